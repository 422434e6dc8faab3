"""Prompts with heads of more than 256 columns on GPUs: one launch for every 256 columns of v. The checked simulator
runs the kernels."""

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil import flash_attention
from mlx_anvil.reference import DTYPES
from support import OUTPUT_FACTOR
from tests.flash_attention.cases import FEATURES, Case, assert_close, draw
from tests.flash_attention.formulas import ROUNDING

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow, pytest.mark.alike("dtype")]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check_forward(case: Case, launches: int, *, matrix_units: bool = False) -> None:
    """Checks output and lse, and the number of launches."""
    with (
        mlx_anvil.simulate(checked=True, matrix_units=matrix_units),
        mlx_anvil.strict(),
        mlx_anvil.trace() as trace,
    ):
        out, lse = flash_attention(case.q, case.k, case.v, return_lse=True, **case.options)
        mx.eval(out, lse)
    assert [event.kernel.split("_")[2] for event in trace.events] == ["forward"] * launches
    exact, rounding = case.reference(), ROUNDING.get(case.q.dtype)
    composed = case.reference(round_to=rounding).out if rounding else None
    assert_close("out", out, exact.out, composed, OUTPUT_FACTOR)
    assert_close("lse", lse, exact.lse, None, OUTPUT_FACTOR)


@each_dtype
@pytest.mark.parametrize("units", [False, True], ids=["apple", "matrix units"])
@pytest.mark.parametrize("dims", [(257, 257), (512, 512), (576, 512), (512, 64), (64, 300)], ids=str)
def test_head_dims(dims: tuple[int, int], units: bool, dtype: mx.Dtype):
    case = draw((2, 1), (37, 45), dims, dtype, "causal", batch=2)
    check_forward(case, 1 + (dims[1] > 256), matrix_units=units)


@each_dtype
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, dtype: mx.Dtype):
    check_forward(draw((2, 2), (33, 70), (512, 512), dtype, feature), 2)


@pytest.mark.parametrize("q_len", [1, 8])
def test_few_queries_of_more_columns_than_decodes_take(q_len: int):
    check_forward(draw((2, 1), (q_len, 45), (576, 512), mx.float16, "causal"), 2)


def test_rows_that_are_no_vectors():
    case = draw((2, 1), (20, 33), (512, 512), mx.float16, "none")
    case.v = mx.concatenate([case.v, case.v[..., :1]], axis=-1)[..., :512]
    check_forward(case, 2)


def test_pages_of_more_columns_than_decodes_take():
    """Few queries that no decode kernel takes: the pages are gathered for the kernels of prompts."""
    q, table = mx.random.normal((2, 2, 3, 576)), mx.random.permutation(8).reshape(2, 4)
    k, v = (mx.random.normal((8, 1, 16, dim)) for dim in (576, 512))
    options = {"lengths": mx.array([50, 7]), "block_table": table}
    expected = flash_attention(q, k, v, **options)
    with mlx_anvil.simulate(checked=True), mlx_anvil.strict():
        assert mx.allclose(flash_attention(q, k, v, **options), expected, rtol=1e-4, atol=1e-4)

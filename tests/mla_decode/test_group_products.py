"""The kernel of GPUs that multiply for four SIMD groups at once, which takes many heads."""

import mlx.core as mx
import pytest

import mlx_anvil
from support import kernel_names
from tests.mla_decode.cases import check_output, draw

pytestmark = pytest.mark.usefixtures("group_products")

each_half = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
KERNEL = "mla_decode_matrix_group_"


def launched(case) -> list[str]:
    with mlx_anvil.trace() as trace:
        mx.eval(case.attend())
    return kernel_names(trace)


@each_half
@pytest.mark.parametrize("rows", [(9, 1), (16, 1), (64, 1), (65, 1), (20, 3), (128, 1), (9, 16)], ids=str)
def test_rows(rows, dtype):
    """Blocks of 64 rows, which are heads times queries, with partial last ones."""
    heads, q_len = rows
    case = draw(heads, (q_len, 90), (512, 64), dtype, "causal", batch=2)
    assert launched(case)[0].startswith(KERNEL)
    check_output(case)


@each_half
@pytest.mark.parametrize("keys", [1, 2, 31, 32, 63, 64, 65, 127, 129, 192, 300, 777])
def test_keys(keys, dtype):
    """Partial tiles of keys, a first tile without a second one, and keys in parts."""
    check_output(draw(24, (1, keys), (512, 64), dtype, "sinks"))


@each_half
@pytest.mark.parametrize("dims", [(8, 8), (72, 8), (256, 32), (264, 64), (504, 56)], ids=str)
def test_dims(dims, dtype):
    check_output(draw(33, (2, 200), dims, dtype, "causal"))


@each_half
@pytest.mark.parametrize("feature", ["none", "causal", "softcap", "sinks"])
@pytest.mark.parametrize("keys", [100, 600], ids=["one part", "parts"])
def test_features(feature, keys, dtype):
    check_output(draw(40, (2, keys), (512, 64), dtype, feature))


@each_half
def test_scores_that_rise_and_fall(dtype):
    for step in (40.0, -40.0):
        case = draw(20, (1, 300), (64, 16), dtype)
        case.q_rope = mx.ones_like(case.q_rope)
        rising = mx.linspace(0, step, 300)[:, None]
        case.k_rope = (mx.broadcast_to(rising, (300, 16)) / 2).astype(dtype)[None, None]
        check_output(case)


def test_negative_scale():
    case = draw(20, (1, 100), (64, 16), mx.float16)
    case.options["scale"] = -0.1
    check_output(case)


def test_other_calls_take_the_other_kernel():
    few = draw(8, (1, 100), (512, 64), mx.float16)
    masked = draw(20, (1, 100), (512, 64), mx.float16, "bool mask")
    odd = draw(20, (1, 100), (511, 63), mx.float16)
    for case in (few, masked, odd):
        assert not launched(case)[0].startswith(KERNEL)
        check_output(case)

"""Many rows per expert on GPUs that multiply for four SIMD groups at once. The checked simulator runs these kernels,
whose products complete there when they start."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from quantized_numpy import FLOAT_FORMATS, Format
from tests.gather_matmul.metal_cases import Case

pytestmark = [pytest.mark.slow, pytest.mark.alike("dtype"), pytest.mark.usefixtures("group_products")]

FOUR_BITS = Format("affine", 64, 4)
FORMATS = [Format("affine", group, bits) for bits, group in ((2, 64), (3, 32), (4, 64), (5, 64), (6, 32), (8, 64))]
each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
each_product = pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])


def draw(rng, format, dtype, pairs, outputs, **options) -> Case:
    options = {"columns": 256, "sorted_ids": True, "rounded_weights": True} | options
    return Case.draw(rng, format, dtype, pairs, outputs, **options)


def check(case: Case, tile: int) -> None:
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        result = case.evaluate()
    gated = "gated_" if len(case.matrices) == 2 else ""
    assert trace.kernels[-1].startswith(f"gather_gemm_group_{gated}"), trace.kernels
    if support.backend == "cpu":  # a GPU's tiles depend on how many multiprocessors it has
        assert f"_r{tile}" in trace.kernels[-1], trace.kernels
    case.check(result)


@each_dtype
@each_product
@pytest.mark.parametrize("format", [*FORMATS, *FLOAT_FORMATS], ids=str)
def test_formats(format, gated, dtype, rng):
    check(draw(rng, format, dtype, 90, 150, gated=gated), 64)


@each_dtype
@each_product
@pytest.mark.parametrize(("bits", "pairs", "tile"), [(4, 51, 64), (4, 123, 128), (2, 430, 256), (8, 430, 128)])
def test_tiles(bits, pairs, tile, gated, dtype, rng):
    check(draw(rng, Format("affine", 64, bits), dtype, pairs, 37, gated=gated), tile)


@each_product
@pytest.mark.parametrize(
    ("format", "columns"),
    [
        (Format("affine", 128, 4), 512),  # a step has one scale per row
        (Format("affine", 32, 4), 320),  # the last step is not whole
        (Format("affine", 32, 8), 192),
        (Format("nvfp4", 16, 4), 192),
    ],
    ids=str,
)
def test_columns(format, columns, gated, rng):
    check(draw(rng, format, mx.bfloat16, 60, 70, columns=columns, gated=gated), 64)


@each_product
def test_rows_of_one_pair(gated, rng):
    """Pairs that are not sorted have tiles of their own rows."""
    case = draw(rng, FOUR_BITS, mx.float16, 3, 70, rows=41, sorted_ids=False, gated=gated)
    check(case, 128)


@each_product
def test_order_is_not_needed(gated, rng):
    """Threadgroups then take several tiles in turn."""
    case = draw(rng, FOUR_BITS, mx.float16, 90, 45, gated=gated)
    rng.shuffle(case.rhs)
    case.check(case.evaluate(hide_ids=True))


def test_all_pairs_of_one_expert(rng):
    case = draw(rng, FOUR_BITS, mx.bfloat16, 300, 45, gated=True)
    for expert in (0, 2):
        case.rhs[:] = expert
        check(case, 128)


@pytest.mark.cpu_only
@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_activations(activation, rng):
    """Results are those of the tiles of other GPUs."""
    case = draw(rng, FOUR_BITS, mx.float16, 90, 45, gated=True)
    case.activation = {"activation": activation}
    ours = case.evaluate()
    with mlx_anvil.simulate(matrix_units=True):
        theirs = case.evaluate()
    np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=2e-3, atol=1e-4)

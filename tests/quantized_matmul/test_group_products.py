"""x W^T on GPUs that multiply for four SIMD groups at once. The checked simulator runs these kernels, whose products
complete there when they start."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from quantized_numpy import FLOAT_FORMATS, Format, draw, normal
from tests.quantized_matmul.test_dense_route import assert_dense_close

pytestmark = [pytest.mark.slow, pytest.mark.alike("dtype"), pytest.mark.usefixtures("group_products")]

FORMATS = [Format("affine", group, bits) for bits, group in ((2, 64), (3, 32), (4, 64), (5, 64), (6, 32), (8, 64))]
each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


def check(format: Format, rows: int, shape: tuple[int, ...], dtype: mx.Dtype, rng, tile: int) -> list[str]:
    """`shape` is that of w."""
    matrix = draw(format, shape, rng, dtype)
    x = normal((*shape[:-2], rows, shape[-1]), dtype)
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        result = mlx_anvil.quantized_matmul(x, *matrix.arrays, transpose=True, **format.options)
        mx.eval(result)
    assert trace.kernels[0].startswith("quantized_gemm_group_"), trace.kernels
    if support.backend == "cpu":  # a GPU's tiles depend on how many multiprocessors it has
        assert f"_r{tile}" in trace.kernels[0], trace.kernels
    assert_dense_close(result, x, matrix)
    return trace.kernels


@each_dtype
@pytest.mark.parametrize("format", [*FORMATS, *FLOAT_FORMATS], ids=str)
def test_formats(format, dtype, rng):
    check(format, 33, (150, 256), dtype, rng, 64)


@each_dtype
@pytest.mark.parametrize(("rows", "tile"), [(64, 64), (65, 128), (129, 192), (193, 256), (300, 256)])
def test_tiles(rows, tile, dtype, rng):
    check(Format("affine", 64, 4), rows, (37, 256), dtype, rng, tile)


@pytest.mark.parametrize(
    ("format", "columns"),
    [
        (Format("affine", 128, 4), 512),  # a step has one scale per row
        (Format("affine", 64, 4), 384),
        (Format("affine", 32, 4), 320),  # the last step is not whole
        (Format("affine", 32, 8), 192),
        (Format("mxfp4", 32, 4), 384),
        (Format("nvfp4", 16, 4), 192),
    ],
    ids=str,
)
def test_columns(format, columns, rng):
    check(format, 40, (130, columns), mx.bfloat16, rng, 64)


def test_parts(rng):
    """Few tiles: the terms are split."""
    kernels = check(Format("affine", 64, 4), 70, (20, 1152), mx.float16, rng, 128)
    assert support.backend == "cuda" or "quantized_sum_parts" in kernels[1]


def test_batch(rng):
    check(Format("affine", 64, 4), 70, (2, 20, 256), mx.bfloat16, rng, 128)


def test_nan_codes(rng):
    """A NaN among the weights of mxfp8 makes the results of its row NaN, and no others."""
    matrix = draw(Format("mxfp8", 32, 8), (20, 256), rng, mx.float16)
    w = np.array(matrix.arrays[0])
    w.view(np.uint8)[3, 77] = 0x7F
    x = normal((40, 256), mx.float16)
    result = mlx_anvil.quantized_matmul(x, mx.array(w), *matrix.arrays[1:], group_size=32, bits=8, mode="mxfp8")
    assert np.array_equal(np.isnan(np.array(result.astype(mx.float32))).any(0), np.arange(20) == 3)


def test_many_rows_are_a_dense_product(rng):
    matrix = draw(Format("affine", 64, 8), (20, 256), rng, mx.float16)
    x = normal((200, 256), mx.float16)
    with mlx_anvil.trace() as trace:
        mx.eval(mlx_anvil.quantized_matmul(x, *matrix.arrays, group_size=64, bits=8))
    assert trace.kernels[-1] == "mx.matmul"

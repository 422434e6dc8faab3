"""Products of more than 8 rows on GPUs with matrix units: which kernels run, and dense products in several blocks.
These tests also run on CUDA, where blocks share memory."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil import _ext
from quantized_numpy import FLOAT_FORMATS, Format, Matrix, draw, normal
from support import to_numpy

pytestmark = pytest.mark.usefixtures("gpu_with_matrix_units")

FOUR_BITS = Format("affine", 64, 4)
FORMATS = [Format("affine", group, bits) for bits, group in ((2, 32), (3, 64), (4, 64), (5, 128), (6, 64), (8, 32))]
HALVES = (mx.float16, mx.bfloat16)
DENSE, GEMM = ["quantized_dequantize", "mx.matmul"], ["quantized_gemm"]
MANY = 600  # rows, too many for GEMM


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Limits blocks to 256 rows or columns of w."""
    before = _ext._set_dense_scratch_bytes(1)
    yield
    _ext._set_dense_scratch_bytes(before)


def traced(call, *args, **options) -> tuple[mx.array, list[str]]:
    """The result, and the names of the kernels without dtype, format and constants."""
    with mlx_anvil.strict(), mlx_anvil.trace() as trace:
        result = call(*args, **options)
        mx.eval(result)
    return result, ["_".join(name.split("_")[:2]) for name in trace.kernels]


def assert_dense_close(result: mx.array, x: mx.array, matrix: Matrix, transpose: bool = True) -> None:
    """Allows for rounding both the weights and the result to 16 bits."""
    weights = matrix.weights.swapaxes(-1, -2) if transpose else matrix.weights
    unit = 2.0**-11 if x.dtype == mx.float16 else 2.0**-8
    terms = np.abs(to_numpy(x)) @ np.abs(weights)
    error = np.abs(to_numpy(result) - to_numpy(x) @ weights)
    assert (error <= unit * (terms + np.abs(to_numpy(x) @ weights)) + 1e-6 * terms.max()).all()
    # Roundings are independent: together they are far smaller than their bound.
    assert error.max() <= 8 * unit * np.abs(to_numpy(x) @ weights).max()


@pytest.mark.parametrize("transpose", [True, False], ids=["x W^T", "x W"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("format", [*FORMATS, *FLOAT_FORMATS], ids=str)
def test_many_rows_are_a_dense_product(format, dtype, transpose, rng):
    matrix = draw(format, (37, 384), rng, dtype)
    x = normal((MANY if transpose else 9, 384 if transpose else 37), dtype)
    result, kernels = traced(mlx_anvil.quantized_matmul, x, *matrix.arrays, transpose=transpose, **format.options)
    assert kernels == DENSE
    assert_dense_close(result, x, matrix, transpose)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "transpose", "kernels"),
    [
        (9, 256, mx.bfloat16, True, GEMM),
        (MANY, 256, mx.bfloat16, True, DENSE),
        (9, 192, mx.bfloat16, True, DENSE),  # rows of scales that are no whole number of 4 bytes
        (9, 256, mx.bfloat16, False, ["quantized_gemmplain"]),
        (MANY, 256, mx.bfloat16, False, DENSE),
        (8, 384, mx.bfloat16, False, ["quantized_plain"]),
        (49, 256, mx.float32, True, ["quantized_matmul"]),
    ],
)
def test_kernels_by_size(rows, columns, dtype, transpose, kernels, rng):
    matrix = draw(FOUR_BITS, (32, columns), rng, dtype)
    x = normal((rows, columns if transpose else 32), dtype)
    result, launched = traced(mlx_anvil.quantized_matmul, x, *matrix.arrays, transpose=transpose)
    assert launched == kernels
    assert_dense_close(result, x.astype(mx.float16) if dtype == mx.float32 else x, matrix, transpose)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", [(), (2,)], ids=["one", "batch"])
def test_blocks(shape, rng):
    x, y = normal((*shape, MANY, 640), mx.float16), normal((*shape, MANY, 600), mx.float16)
    matrix = draw(FOUR_BITS, (*shape, 600, 640), rng, mx.float16)
    result, kernels = traced(mlx_anvil.quantized_matmul, x, *matrix.arrays)
    blocks = 3 * (shape or (1,))[0]
    assert kernels == ["quantized_dequantize"] * blocks + ["mx.matmul"]
    assert_dense_close(result, x, matrix)
    back, kernels = traced(mlx_anvil.quantized_matmul, y, *matrix.arrays, transpose=False)
    assert kernels == ["quantized_dequantize"] * blocks + ["mx.matmul"]
    assert_dense_close(back, y, matrix, transpose=False)


def test_a_batch_is_one_block(rng):
    matrix = draw(FOUR_BITS, (3, 40, 384), rng, mx.bfloat16)
    x = normal((3, MANY, 384), mx.bfloat16)
    result, kernels = traced(mlx_anvil.quantized_matmul, x, *matrix.arrays)
    assert kernels == DENSE
    assert_dense_close(result, x, matrix)


def test_transformations(rng):
    """The gradient in x, vmap, compile and shapeless compile take the same route, with the same bits."""
    matrix = draw(FOUR_BITS, (40, 384), rng, mx.float16)
    x, y = normal((MANY, 384), mx.float16), normal((MANY, 40), mx.float16)

    def product(x: mx.array) -> mx.array:
        return mlx_anvil.quantized_matmul(x, *matrix.arrays)

    result, _ = traced(product, x)
    gradient, kernels = traced(lambda: mx.vjp(product, [x], [y])[1][0])
    assert kernels[-2:] == DENSE
    assert_dense_close(gradient, y, matrix, transpose=False)
    for call in (mx.compile(product), mx.compile(product, shapeless=True), mx.vmap(product)):
        other, kernels = traced(call, x)
        assert kernels == DENSE
        support.assert_same_bits(other, result)

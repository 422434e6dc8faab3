"""Quantized products of few rows on GPUs with matrix units, whose kernels the simulator runs if told so."""

import mlx.core as mx
import pytest

import mlx_anvil
from quantized_numpy import Format, assert_rounded, draw
from support import assert_same_bits, poison_memory, to_numpy

pytestmark = pytest.mark.cpu_only

each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
each_format = pytest.mark.parametrize("format", [Format("affine", group, 4) for group in (32, 64, 128)], ids=str)


@pytest.fixture(autouse=True)
def matrix_units():
    with mlx_anvil.simulate(checked=True, matrix_units=True):
        yield


def traced(op, *args, **options) -> mx.array:
    """The result of an op that is one kernel for matrix units."""
    poison_memory(1 << 16)
    with mlx_anvil.trace() as trace:
        result = op(*args, **options)
        mx.eval(result)
    assert len(trace.kernels) == 1
    assert "_matrix_" in trace.kernels[0]
    return result


def draw_x(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


@each_dtype
@each_format
def test_products(format, dtype, rng):
    # Columns: less than a step of 256, several, a ragged last one; enough that all four SIMD groups have some.
    for rows, outputs, columns in ((1, 37, 128), (3, 16, 384), (8, 5, 1280), (5, 1, 2432)):
        matrix = draw(format, (outputs, columns), rng, dtype)
        x = draw_x((rows, columns), dtype)
        result = traced(mlx_anvil.quantized_matmul, x, *matrix.arrays, transpose=True, **format.options)
        assert_rounded(result, to_numpy(x) @ matrix.weights.T, dtype, terms=columns)


@each_dtype
def test_columns_are_not_shared_by_many_rows(dtype, rng):
    format = Format("affine", 64, 4)
    matrix = draw(format, (16387, 64), rng, dtype)
    x = draw_x((2, 64), dtype)
    result = traced(mlx_anvil.quantized_matmul, x, *matrix.arrays, transpose=True, **format.options)
    assert_rounded(result, to_numpy(x) @ matrix.weights.T, dtype, terms=64)


@each_dtype
def test_batches(dtype, rng):
    format = Format("affine", 64, 4)
    matrix = draw(format, (3, 19, 192), rng, dtype)
    x = draw_x((3, 4, 192), dtype)
    result = traced(mlx_anvil.quantized_matmul, x, *matrix.arrays, transpose=True, **format.options)
    assert_rounded(result, to_numpy(x) @ matrix.weights.swapaxes(-1, -2), dtype, terms=192)


@each_dtype
def test_rows_do_not_depend_on_their_number(dtype, rng):
    format = Format("affine", 64, 4)
    matrix = draw(format, (24, 832), rng, dtype)
    x = draw_x((8, 832), dtype)
    whole = traced(mlx_anvil.quantized_matmul, x, *matrix.arrays, transpose=True, **format.options)
    for first, count in ((0, 1), (7, 1), (2, 3), (1, 5)):
        part = x[first : first + count]
        result = traced(mlx_anvil.quantized_matmul, part, *matrix.arrays, transpose=True, **format.options)
        assert_same_bits(result, whole[first : first + count])


def test_other_formats_and_layouts_keep_their_kernels(rng):
    matrices = [draw(Format("affine", 64, 3), (8, 128), rng, mx.float16)]
    matrices += [draw(Format("affine", 64, 4), (8, 128), rng, mx.float32)]
    for matrix, dtype in zip(matrices, (mx.float16, mx.float32), strict=True):
        with mlx_anvil.trace() as trace:
            mx.eval(mlx_anvil.quantized_gemv(draw_x((1, 128), dtype), *matrix.arrays, **matrix.format.options))
        assert "_matrix_" not in trace.kernels[0]

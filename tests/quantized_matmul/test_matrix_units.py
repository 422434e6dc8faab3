"""Quantized products of few rows on GPUs with matrix units. The checked simulator runs their kernels."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import gated
from quantized_numpy import Format, Matrix, assert_rounded, draw
from support import assert_same_bits, poison_memory, to_numpy

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.slow,
    pytest.mark.alike("dtype"),
    pytest.mark.usefixtures("matrix_units"),
]

each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
each_format = pytest.mark.parametrize("format", [Format("affine", group, 4) for group in (32, 64, 128)], ids=str)


def traced(op, *args, tile: str = "n16s8", **options) -> mx.array:
    """The result of an op. Checks that it ran one kernel for matrix units, with this tile (rows of w, SIMD groups)."""
    poison_memory(1 << 16)
    with mlx_anvil.trace() as trace:
        result = op(*args, **options)
        mx.eval(result)
    assert len(trace.kernels) == 1
    assert "_matrix_" in trace.kernels[0]
    assert f"_{tile}" in trace.kernels[0]
    return result


def draw_x(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def multiply(x: mx.array, matrix: Matrix) -> mx.array:
    return traced(mlx_anvil.quantized_matmul, x, *matrix.arrays, transpose=True, **matrix.format.options)


def assert_product(x: mx.array, matrix: Matrix) -> None:
    exact = to_numpy(x) @ matrix.weights.swapaxes(-1, -2)
    assert_rounded(multiply(x, matrix), exact, x.dtype, terms=x.shape[-1])


@each_dtype
@each_format
def test_products(format, dtype, rng):
    # Columns: a step of 256, several; enough that all SIMD groups have some. Rows of w: ragged blocks of 16.
    for rows, outputs, columns in ((1, 37, 256), (3, 32, 768), (8, 5, 2304), (5, 1, 512)):
        matrix = draw(format, (outputs, columns), rng, dtype)
        x = draw_x((rows, columns), dtype)
        assert_product(x, matrix)


@each_dtype
@each_format
def test_swiglu(format, dtype, rng):
    for rows, outputs, columns in ((1, 35, 256), (8, 16, 512), (3, 2, 2304)):
        gate, up = (draw(format, (outputs, columns), rng, dtype) for _ in range(2))
        x = draw_x((rows, columns), dtype)
        x = x / 30  # no gate so large that its error is magnified
        result = traced(mlx_anvil.quantized_swiglu, x, gate.arrays, up.arrays, **format.options)
        g, u = (to_numpy(x) @ matrix.weights.T for matrix in (gate, up))
        assert_rounded(result, g / (1 + np.exp(-g)) * u, dtype, terms=columns)


@each_dtype
@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"])
def test_activations(activation, limit, dtype, rng):
    format = Format("affine", 64, 4)
    gate, up = (draw(format, (19, 256), rng, dtype) for _ in range(2))
    x = draw_x((3, 256), dtype) / 30
    options = {"activation": activation, "limit": limit}
    result = traced(mlx_anvil.quantized_swiglu, x, gate.arrays, up.arrays, **format.options, **options)
    g, u = (to_numpy(x) @ matrix.weights.T for matrix in (gate, up))
    assert limit is None or ((g > limit).any() and (abs(u) > limit).any())
    with mx.stream(mx.cpu):
        exact = np.array(gated(*(mx.array(a, mx.float64) for a in (g, u)), **options))
    assert_rounded(result, exact, dtype, terms=256)


@pytest.mark.alike("format", "dtype")  # the smaller tests run each
@each_dtype
@each_format
@pytest.mark.parametrize(("outputs", "tile"), [(4667, "n32s4"), (65539, "n32s8")], ids=["several", "many"])
def test_many_rows_of_w(outputs, tile, format, dtype, rng):
    # Of 4667 some tiles have half as many rows. Of 65539 threadgroups take several; one row of x is staged, eight are
    # not.
    columns = 768 if outputs == 4667 else 256
    w = draw(format, (outputs, columns), rng, dtype)
    x = draw_x((8, columns), dtype)
    options = {"transpose": True, **format.options}
    result = traced(mlx_anvil.quantized_matmul, x, *w.arrays, tile=tile, **options)
    assert_rounded(result, to_numpy(x) @ w.weights.T, dtype, terms=columns)
    one = traced(mlx_anvil.quantized_matmul, x[3:4], *w.arrays, tile=tile, **options)
    assert_same_bits(one, result[3:4])


@each_dtype
@each_format
def test_swiglu_of_many_rows_of_w(format, dtype, rng):
    gate, up = (draw(format, (2117, 512), rng, dtype) for _ in range(2))
    x = draw_x((2, 512), dtype) / 30
    result = traced(mlx_anvil.quantized_swiglu, x, gate.arrays, up.arrays, tile="n32s4", **format.options)
    g, u = (to_numpy(x) @ matrix.weights.T for matrix in (gate, up))
    assert_rounded(result, g / (1 + np.exp(-g)) * u, dtype, terms=512)


@each_dtype
def test_batches(dtype, rng):
    format = Format("affine", 64, 4)
    matrix = draw(format, (3, 19, 512), rng, dtype)
    x = draw_x((3, 4, 512), dtype)
    assert_product(x, matrix)


@each_dtype
def test_rows_do_not_depend_on_their_number(dtype, rng):
    format = Format("affine", 64, 4)
    matrix = draw(format, (24, 768), rng, dtype)
    x = draw_x((8, 768), dtype)
    whole = multiply(x, matrix)
    for first, count in ((0, 1), (7, 1), (2, 3), (1, 5)):
        assert_same_bits(multiply(x[first : first + count], matrix), whole[first : first + count])


def test_other_formats_and_layouts_keep_their_kernels(rng):
    matrices = [draw(Format("affine", 64, 3), (8, 256), rng, mx.float16)]
    matrices += [draw(Format("affine", 64, 4), (8, 256), rng, mx.float32)]
    matrices += [draw(Format("affine", 64, 4), (8, 320), rng, mx.float16)]
    for matrix, dtype in zip(matrices, (mx.float16, mx.float32, mx.float16), strict=True):
        with mlx_anvil.trace() as trace:
            mx.eval(
                mlx_anvil.quantized_gemv(
                    draw_x((1, matrix.weights.shape[1]), dtype), *matrix.arrays, **matrix.format.options
                )
            )
        assert "_matrix_" not in trace.kernels[0]

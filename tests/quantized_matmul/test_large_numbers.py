"""Quantized products of x near the largest number of its dtype are finite wherever the exact result is. On the CPU with
every instruction set; on the other backends with the Metal kernels."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import gated
from quantized_numpy import FLOAT_FORMATS, Format, Matrix, draw
from support import assert_same_bits, to_numpy

FORMATS = [Format("affine", 64, bits) for bits in (2, 3, 4, 5, 6, 8)] + list(FLOAT_FORMATS)
LIMITS = {mx.bfloat16: 2.0**-8, mx.float32: 1e-5}
OUTPUTS = COLUMNS = 256  # whole steps of the kernels for matrix units, which CUDA takes
LARGE = 3e38

on_cpu = support.backend == "cpu"
# On CUDA more rows are dense products of MLX's.
COUNTS = (1, 5) if support.backend == "cuda" else (1, 5, 9, 20, 40)


def silu(x: np.ndarray) -> np.ndarray:
    return np.where(x > -700, x / (1 + np.exp(-np.maximum(x, -700))), 0)


def small_matrix(
    format: Format, dtype: mx.Dtype, rng: np.random.Generator, shape: tuple[int, int] = (OUTPUTS, COLUMNS)
) -> Matrix:
    """Weights so small that sums of products with LARGE numbers are finite."""
    if format.affine:
        matrix = draw(format, shape, rng, dtype)
        largest = np.abs(matrix.weights).max()
        small = [(to_numpy(x) / largest / 1024) for x in (matrix.scales, matrix.biases)]
        return Matrix(format, matrix.w, *(mx.array(x.astype(np.float32)).astype(dtype) for x in small))
    codes = rng.integers(0, 2**format.bits, shape)
    if format.mode == "mxfp8":
        codes = np.where(codes % 128 == 127, 0, codes)  # NaN
    least = 0x08 if format.mode == "nvfp4" else 127 - 20  # 2^-6 and 2^-20
    raw_scales = np.full((shape[0], shape[1] // format.group_size), least)
    return Matrix.of_codes(format, codes, raw_scales=raw_scales)


def rows_with(count: int, dtype: mx.Dtype, rng: np.random.Generator) -> mx.array:
    """By turns an ordinary row, a row with one large number, and a row of large numbers."""
    x = rng.standard_normal((count, COLUMNS))
    x[::3, 5] = LARGE
    x[1::3] = np.sign(x[1::3]) * LARGE / 64 * rng.uniform(0.5, 1, x[1::3].shape)
    return mx.array(x.astype(np.float32)).astype(dtype)


def assert_rows_close(result: mx.array, exact: np.ndarray, limit: float) -> None:
    """Compares each row relative to its own scale."""
    assert np.isfinite(exact).all()
    assert np.abs(exact).max() < 3.38e38
    error = np.abs(to_numpy(result) - exact).max(axis=-1) / np.abs(exact).max(axis=-1)
    assert error.max() <= limit


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_products_and_gradients(instruction_set, format, dtype, rng):
    matrix = small_matrix(format, dtype, rng)
    # Integers are off by a share of the largest number of x and of scales.
    limit = LIMITS[dtype] * 4
    for count in COUNTS:
        x = rows_with(count, dtype, rng)
        for transpose in (True, False):
            result = mlx_anvil.quantized_matmul(x, *matrix.arrays, transpose=transpose, **format.options)
            exact = to_numpy(x) @ (matrix.weights.T if transpose else matrix.weights)
            assert_rows_close(result, exact, limit)

        def product(x):
            return mlx_anvil.quantized_matmul(x, *matrix.arrays, **format.options)

        (gradient,) = mx.vjp(product, [mx.zeros_like(x)], [x])[1]
        assert_rows_close(gradient, to_numpy(x) @ matrix.weights, limit)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_sums_overflow_on_the_way(instruction_set, dtype, rng):
    """Weights of 15/8 - 1: the scaled codes alone overflow, and so does the sum of two products, which a third
    cancels."""
    format = Format("affine", 64, 4)
    codes = rng.integers(0, 16, (OUTPUTS, COLUMNS))
    codes[:, 5:8] = codes[5:8] = 15
    matrix = Matrix.of_codes(format, codes, scale=0.125, bias=-1.0, dtype=dtype)
    for count in COUNTS:
        x = rng.standard_normal((count, COLUMNS))
        x[:, 5:8] = LARGE, LARGE, -LARGE
        x = mx.array(x.astype(np.float32)).astype(dtype)
        for transpose in (True, False):
            result = mlx_anvil.quantized_matmul(x, *matrix.arrays, transpose=transpose, **format.options)
            exact = to_numpy(x) @ (matrix.weights.T if transpose else matrix.weights)
            assert_rows_close(result, exact, LIMITS[dtype] * 4)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_swiglu_and_head(instruction_set, dtype, rng):
    format = Format("affine", 64, 4)
    matrix, x = small_matrix(format, dtype, rng), rows_with(5, dtype, rng)
    exact = to_numpy(x) @ matrix.weights.T
    indices, values = mlx_anvil.quantized_topk(x, *matrix.arrays, k=3, **format.options)
    # Logits that round to the same number, one unit in the last place apart at most, tie: the lowest index wins.
    chosen, best = exact[np.arange(len(exact)), np.array(indices[:, 0])], exact.max(axis=-1)
    assert (best - chosen <= (1.01 * 2**-7 if dtype == mx.bfloat16 else 1e-6) * np.abs(best)).all()
    assert np.isfinite(to_numpy(values)).all()
    if support.backend != "cuda":  # whose quantized_gemv takes matrix units
        product = mlx_anvil.quantized_gemv if on_cpu else mlx_anvil.quantized_matmul  # both by tiles
        assert_same_bits(values[:, 0], product(x, *matrix.arrays, **format.options).max(axis=-1))

    up = Matrix(format, matrix.w, matrix.scales * 2.0**-110, matrix.biases * 2.0**-110)
    result = mlx_anvil.quantized_swiglu(x, matrix.arrays, up.arrays, **format.options)
    expected = silu(exact) * (to_numpy(x) @ up.weights.T)
    large = [0, 1, 3, 4]
    assert_rows_close(result[mx.array(large)], expected[large], 2**-6 if dtype == mx.bfloat16 else 1e-4)


def assert_clamped(activation: str, dtype: mx.Dtype, rng: np.random.Generator) -> None:
    """Large products of either sign, whose sums of codes times x often overflow. A limit or ``relu2`` could hide
    that."""
    format, halves = Format("affine", 64, 4), [4, 12]  # of weights -0.5 and 0.5
    codes = rng.integers(0, 16, (2, OUTPUTS, COLUMNS))
    codes[:, :, 5] = rng.choice(halves, (2, OUTPUTS))
    gate, up = (Matrix.of_codes(format, c, scale=0.125, bias=-1.0, dtype=dtype) for c in codes)
    x = rng.standard_normal((8, COLUMNS))
    x[:, 5] = np.outer([1, -1], [LARGE, LARGE / 16, LARGE / 64, LARGE / 256]).ravel()
    x = mx.array(x.astype(np.float32)).astype(dtype)
    result = mlx_anvil.quantized_swiglu(x, gate.arrays, up.arrays, activation=activation, limit=7.0, **format.options)
    with mx.stream(mx.cpu):
        # Beyond 50 all are the limit or 0.
        products = (mx.array(np.clip(to_numpy(x) @ m.weights.T, -50, 50), mx.float64) for m in (gate, up))
        exact = np.array(gated(*products, activation=activation, limit=7.0))
    error = np.abs(to_numpy(result) - exact)
    assert error.max() <= 2.0**-8 * np.abs(exact).max()


each_activation = pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"])


@each_activation
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_limit_does_not_hide_overflow(instruction_set, activation, dtype, rng):
    assert_clamped(activation, dtype, rng)


@pytest.mark.cpu_only
@pytest.mark.slow
@pytest.mark.usefixtures("matrix_units")
@each_activation
def test_a_limit_does_not_hide_overflow_in_matrix_units(activation, rng):
    assert_clamped(activation, mx.bfloat16, rng)


@pytest.mark.cpu_only
@pytest.mark.slow
@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize(("group", "outputs"), [(32, 37), (64, 37), (128, 37), (64, 4667)])
def test_matrix_units(group, outputs, rng):
    format, dtype = Format("affine", group, 4), mx.bfloat16
    gate, up = (small_matrix(format, dtype, rng, (outputs, COLUMNS)) for _ in range(2))
    up = Matrix(format, up.w, up.scales * 2.0**-110, up.biases * 2.0**-110)
    x = rows_with(5, dtype, rng)
    with mlx_anvil.trace() as trace:
        product = mlx_anvil.quantized_gemv(x, *gate.arrays, **format.options)
        swiglu = mlx_anvil.quantized_swiglu(x, gate.arrays, up.arrays, **format.options)
        mx.eval(product, swiglu)
    assert len(trace.kernels) == 2
    assert all("_matrix_" in kernel for kernel in trace.kernels)
    assert_rows_close(product, to_numpy(x) @ gate.weights.T, LIMITS[dtype] * 4)
    large = [0, 1, 3, 4]
    expected = silu(to_numpy(x) @ gate.weights.T) * (to_numpy(x) @ up.weights.T)
    assert_rows_close(swiglu[mx.array(large)], expected[large], 2**-6)


@pytest.mark.cpu_only
@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize("group", [32, 64, 128])
def test_large_scales_in_matrix_units(group, rng):
    """The offset of bfloat16 codes, 128 times the scale, nearly overflows float32, and sums of codes times x do."""
    format = Format("affine", group, 4)
    codes = rng.integers(0, 16, (37, COLUMNS))
    matrix = Matrix.of_codes(format, codes, scale=2.0**120, bias=-(2.0**123), dtype=mx.bfloat16)
    x = mx.array(rng.standard_normal((3, COLUMNS)).astype(np.float32) / 32).astype(mx.bfloat16)
    result = mlx_anvil.quantized_gemv(x, *matrix.arrays, **format.options)
    assert_rows_close(result, to_numpy(x) @ matrix.weights.T, LIMITS[mx.bfloat16] * 4)


def test_a_large_row_does_not_change_the_others(instruction_set, rng):
    format = Format("affine", 64, 4)
    matrix = small_matrix(format, mx.bfloat16, rng)
    x = mx.random.normal((8, COLUMNS)).astype(mx.bfloat16)
    beside = mx.concatenate([x[:3], mx.full((1, COLUMNS), LARGE, mx.bfloat16), x[4:]])
    for count in (8,) if support.backend == "cuda" else (8, 24):
        ordinary, other = (
            mlx_anvil.quantized_matmul(mx.concatenate([rows] * (count // 8)), *matrix.arrays, **format.options)
            for rows in (x, beside)
        )
        keep = mx.array([0, 1, 2, 4, 5, 6, 7])
        assert_same_bits(ordinary[keep], other[keep])


def test_infinity_stays(instruction_set, rng):
    format = Format("affine", 64, 4)
    matrix = small_matrix(format, mx.bfloat16, rng)
    x = rows_with(3, mx.bfloat16, rng)
    x[0, 7] = -np.inf
    x[1, 7] = np.nan
    result = to_numpy(mlx_anvil.quantized_matmul(x, *matrix.arrays, **format.options))
    assert not np.isfinite(result[0]).any()
    assert np.isnan(result[1]).all()
    assert np.isfinite(result[2]).all()


@pytest.mark.cpu_only
def test_terms_of_scales_and_biases_add_before_a_large_x(rng):
    """In the gradient of a gradient: products of x with each overflow, and that with their sum does not."""
    w = Matrix.of_codes(Format("affine", 32, 2), np.full((5, 32), 3)).w
    x = rng.standard_normal((1, 32))
    x[:, 0] = 3e38
    scales, biases, d_out, of_scales = (mx.random.normal(shape) for shape in ((5, 1), (5, 1), (1, 5), (5, 1)))
    of_scales = mx.sign(of_scales) * (1 + mx.abs(of_scales))
    of_biases = 0.2 * mx.random.uniform(shape=(5, 1)) - 3 * of_scales
    rows = mx.array(x.astype(np.float32))

    def gradients(d_out):
        def product(*terms):
            return mlx_anvil.quantized_matmul(rows, w, *terms, group_size=32, bits=2)

        return mx.vjp(product, [scales, biases], [d_out])[1]

    (ours,) = mx.vjp(gradients, [d_out], [of_scales, of_biases])[1]
    exact = (3 * to_numpy(of_scales) + to_numpy(of_biases)).T * x.sum()
    np.testing.assert_allclose(to_numpy(ours), exact, atol=1e-5 * 3e38)

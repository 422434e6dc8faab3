"""Quantized products of x near the largest number of its dtype, on every instruction set: finite where the result is."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import _ext
from quantized_numpy import FLOAT_FORMATS, Format, Matrix, draw
from support import assert_same_bits, isas, to_numpy

pytestmark = pytest.mark.cpu_only  # kernels of a GPU add up codes times x as they are

FORMATS = [Format("affine", 64, bits) for bits in (2, 3, 4, 6, 8)] + list(FLOAT_FORMATS)
LIMITS = {mx.bfloat16: 2.0**-8, mx.float32: 1e-5}
OUTPUTS = COLUMNS = 128
LARGE = 3e38


@pytest.fixture(params=isas())
def isa(request):
    before = _ext._current_isa()
    _ext._set_isa(request.param)
    yield request.param
    _ext._set_isa(before)


def small_matrix(format: Format, dtype: mx.Dtype, rng: np.random.Generator) -> Matrix:
    """Weights so small that products with LARGE numbers have sums that are finite."""
    if format.affine:
        matrix = draw(format, (OUTPUTS, COLUMNS), rng, dtype)
        largest = np.abs(matrix.weights).max()
        small = [(to_numpy(x) / largest / 1024) for x in (matrix.scales, matrix.biases)]
        return Matrix(format, matrix.w, *(mx.array(x.astype(np.float32)).astype(dtype) for x in small))
    codes = rng.integers(0, 2**format.bits, (OUTPUTS, COLUMNS))
    if format.mode == "mxfp8":
        codes = np.where(codes % 128 == 127, 0, codes)  # NaN
    least = 0x08 if format.mode == "nvfp4" else 127 - 20  # 2^-6 and 2^-20
    raw_scales = np.full((OUTPUTS, COLUMNS // format.group_size), least)
    return Matrix.of_codes(format, codes, raw_scales=raw_scales)


def rows_with(count: int, dtype: mx.Dtype, rng: np.random.Generator) -> mx.array:
    """Every third row is ordinary, every third has one large number, and the others are large all over."""
    x = rng.standard_normal((count, COLUMNS))
    x[::3, 5] = LARGE
    x[1::3] = np.sign(x[1::3]) * LARGE / 64 * rng.uniform(0.5, 1, x[1::3].shape)
    return mx.array(x.astype(np.float32)).astype(dtype)


def assert_rows_close(result: mx.array, exact: np.ndarray, limit: float) -> None:
    """By each row's own scale."""
    assert np.isfinite(exact).all()
    assert np.abs(exact).max() < 3.38e38
    error = np.abs(to_numpy(result) - exact).max(axis=-1) / np.abs(exact).max(axis=-1)
    assert error.max() <= limit


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_products_and_gradients(isa, format, dtype, rng):
    matrix = small_matrix(format, dtype, rng)
    # Integers are off by a share of the largest number of x and of scales.
    limit = LIMITS[dtype] * 4
    for count in (1, 5, 9, 20):
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
def test_swiglu_and_head(isa, dtype, rng):
    format = Format("affine", 64, 4)
    matrix, x = small_matrix(format, dtype, rng), rows_with(5, dtype, rng)
    exact = to_numpy(x) @ matrix.weights.T
    indices, values = mlx_anvil.quantized_topk(x, *matrix.arrays, k=3, **format.options)
    # Logits that round to the same number, one unit in the last place apart at most, tie: the lowest index wins.
    chosen, best = exact[np.arange(len(exact)), np.array(indices[:, 0])], exact.max(axis=-1)
    assert (best - chosen <= (1.01 * 2**-7 if dtype == mx.bfloat16 else 1e-6) * np.abs(best)).all()
    assert np.isfinite(to_numpy(values)).all()
    assert_same_bits(values[:, 0], mlx_anvil.quantized_gemv(x, *matrix.arrays, **format.options).max(axis=-1))

    up = Matrix(format, matrix.w, matrix.scales * 2.0**-110, matrix.biases * 2.0**-110)
    result = mlx_anvil.quantized_swiglu(x, matrix.arrays, up.arrays, **format.options)
    expected = np.where(exact > -700, exact / (1 + np.exp(-np.maximum(exact, -700))), 0) * (to_numpy(x) @ up.weights.T)
    large = [0, 1, 3, 4]
    assert_rows_close(result[mx.array(large)], expected[large], 2**-6 if dtype == mx.bfloat16 else 1e-4)


def test_a_large_row_does_not_change_the_others(isa, rng):
    format = Format("affine", 64, 4)
    matrix = small_matrix(format, mx.bfloat16, rng)
    x = mx.random.normal((8, COLUMNS)).astype(mx.bfloat16)
    beside = mx.concatenate([x[:3], mx.full((1, COLUMNS), LARGE, mx.bfloat16), x[4:]])
    for count in (8, 24):
        ordinary, other = (
            mlx_anvil.quantized_matmul(mx.concatenate([rows] * (count // 8)), *matrix.arrays, **format.options)
            for rows in (x, beside)
        )
        keep = mx.array([0, 1, 2, 4, 5, 6, 7])
        assert_same_bits(ordinary[keep], other[keep])


def test_infinity_stays(isa, rng):
    format = Format("affine", 64, 4)
    matrix = small_matrix(format, mx.bfloat16, rng)
    x = rows_with(3, mx.bfloat16, rng)
    x[0, 7] = -np.inf
    x[1, 7] = np.nan
    result = to_numpy(mlx_anvil.quantized_matmul(x, *matrix.arrays, **format.options))
    assert not np.isfinite(result[0]).any()
    assert np.isnan(result[1]).all()
    assert np.isfinite(result[2]).all()

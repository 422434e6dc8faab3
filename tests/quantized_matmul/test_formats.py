"""quantized_matmul at the extremes of its formats: every code and scale, zero and subnormal scales, codes that are NaN."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import DTYPES
from quantized_numpy import AFFINE_FORMATS, FLOAT_FORMATS, FORMATS, Format, Matrix, exact_product, normal
from support import to_numpy


def multiply(x: mx.array, matrix: Matrix, transpose: bool = True) -> mx.array:
    return mlx_anvil.quantized_matmul(x, *matrix.arrays, transpose=transpose, **matrix.format.options)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_code(format):
    """The rows of the identity select single weights: every code, at every place in a word."""
    count = 2**format.bits
    codes = (np.arange(format.group_size) + np.arange(max(count, format.group_size))[:, None]) % count
    matrix = Matrix.of_codes(format, codes, scale=1.0, bias=-3.0)
    for rows in (slice(0, 8), slice(0, format.group_size)):
        x = mx.array(np.eye(format.group_size, dtype=np.float32)[rows])
        result, exact = to_numpy(multiply(x, matrix)), exact_product(x, matrix)
        # 0 times NaN: the code that is no number shows in every product of its row.
        np.testing.assert_array_equal(np.isnan(result), np.isnan(exact))
        np.testing.assert_allclose(result, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, 1e-40, -1e-40, 1e-30, 1e30], ids=str)
@pytest.mark.parametrize("format", AFFINE_FORMATS[1::3], ids=str)
def test_affine_scales(format, scale, rng):
    codes = rng.integers(0, 2**format.bits, (5, 2 * format.group_size))
    for rows in (1, 12):
        x = normal((rows, 2 * format.group_size))
        for bias in (0.0, scale, 1.0):
            matrix = Matrix.of_codes(format, codes, scale=scale, bias=bias)
            exact = exact_product(x, matrix)
            error = np.abs(to_numpy(multiply(x, matrix)) - exact)
            terms = np.abs(to_numpy(x)) @ np.abs(matrix.weights).T
            # NVIDIA's tensor cores, which many rows take, have no subnormal factors.
            smallest = 2.0**-126 * np.abs(to_numpy(x)).sum() if support.backend == "cuda" and rows > 8 else 1e-42
            assert (error <= 1e-6 * terms + smallest).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormal_scales_of_16_bits(dtype, rng):
    tiny = {mx.float32: 2.0**-140, mx.float16: 2.0**-24, mx.bfloat16: 2.0**-130}[dtype]
    format = Format("affine", 32, 4)
    codes = rng.integers(0, 16, (6, 64))
    matrix = Matrix.of_codes(format, codes, scale=3 * tiny, bias=-tiny, dtype=dtype)
    x = mx.full((2, 64), 1024.0, dtype)
    exact = exact_product(x, matrix)
    error = np.abs(to_numpy(multiply(x, matrix)) - exact)
    ulp = {mx.float32: 1e-5, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
    assert (error <= np.abs(exact).max() * ulp).all()


@pytest.mark.parametrize("rows", [1, 8, 12])
def test_nan_codes_spoil_their_own_column_alone(rows, rng):
    codes = rng.integers(0, 0x7F, (40, 96))
    codes[[3, 17, 39], [0, 45, 95]] = 0x7F, 0xFF, 0x7F
    matrix = Matrix.of_codes(Format("mxfp8", 32, 8), codes)
    result = to_numpy(multiply(normal((rows, 40)), matrix, transpose=False))
    spoilt = np.isnan(result).all(axis=0)
    assert np.flatnonzero(spoilt).tolist() == [0, 45, 95]
    assert np.isfinite(result[:, ~spoilt]).all()


@pytest.mark.parametrize("format", FLOAT_FORMATS, ids=str)
def test_every_scale(format):
    """One row of weights for each of the 256 scales."""
    top = {"mxfp4": 7, "mxfp8": 0x7E, "nvfp4": 7}[format.mode]
    codes = np.tile(np.array([1, top]), (256, format.group_size // 2))
    matrix = Matrix.of_codes(format, codes, raw_scales=np.arange(256)[:, None])
    x = np.zeros((1, format.group_size), np.float32)
    x[0, :2] = 0.5, 0.25
    with np.errstate(invalid="ignore"):
        exact = exact_product(mx.array(x), matrix)[0]
    result = to_numpy(multiply(mx.array(x), matrix))[0]
    known = np.isfinite(exact) & (np.abs(exact) < 2.0**127)  # scale 0xff of e8m0: NaN by the standard, infinite in MLX
    if format.mode != "nvfp4":
        assert known.sum() >= 245
    else:
        np.testing.assert_array_equal(np.isnan(result), np.isnan(exact))
    # Below 2^-126 a result may lose digits or be taken for 0.
    np.testing.assert_allclose(result[known], exact[known], rtol=1e-6, atol=2.0**-126)

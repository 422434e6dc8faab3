"""MLX's quantized matrix products against NumPy, on weights that MLX's own quantize packed."""

import mlx.core as mx
import numpy as np
import pytest

from tests.mslc.control.mlx_kernels import DECODE, ENCODE, assert_close, library

AFFINE = ["steel/utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"]
FLOATING = ["steel/utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h"]
BITS = [2, 3, 4, 5, 6, 8]
DTYPES = ["float", "half", "bfloat16_t"]
MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


def quantized(rng, rows, columns, group, bits, dtype):
    """Packed weights, scales and biases for a kernel, and the values they stand for."""
    weights = mx.array(rng.standard_normal((rows, columns)).astype(np.float32))
    packed, scales, biases = mx.quantize(weights, group_size=group, bits=bits)
    scales, biases = ENCODE[dtype](np.array(scales)), ENCODE[dtype](np.array(biases))
    rounded = (mx.array(DECODE[dtype](x).astype(np.float32)) for x in (scales, biases))
    values = np.array(mx.dequantize(packed, *rounded, group_size=group, bits=bits)).astype(np.float64)
    return np.array(packed), scales, biases, values


def fp_quantized(rng, rows, columns, mode):
    weights = mx.array(rng.standard_normal((rows, columns)).astype(np.float32))
    packed, scales = mx.quantize(weights, mode=mode)
    values = np.array(mx.dequantize(packed, scales, mode=mode, dtype=mx.float32)).astype(np.float64)
    return np.array(packed), np.array(scales), values


def batch(first, count):
    """Shapes and strides of a batch of one, bound from `first` on."""
    shape, strides = np.ones(4, np.int32), np.zeros(4, np.int64)
    layout = {0: 1, 1: shape, 2: strides, 3: 1, 4: shape, **dict.fromkeys(range(5, count), strides)}
    return {first + i: value for i, value in layout.items()}


# qmv_fast wants whole blocks of columns, qmv takes any; rows that do not fill the last threadgroup are qmv's too.
@pytest.mark.parametrize(
    ("kernel", "rows", "columns"), [("affine_qmv_fast", 24, 512), ("affine_qmv", 24, 192), ("affine_qmv", 5, 320)]
)
@pytest.mark.alike("dtype")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_qmv(rng, dtype, bits, kernel, rows, columns):
    group = 64
    names = ("affine_qmv_fast", "affine_qmv")
    kernels = library(AFFINE, [(name, name, dtype, group, bits, "false") for name in names])
    packed, scales, biases, values = quantized(rng, rows, columns, group, bits, dtype)
    x = ENCODE[dtype](rng.standard_normal(columns))
    out = np.zeros(rows, x.dtype)
    buffers = {0: packed, 1: scales, 2: biases, 3: x, 4: out, 5: columns, 6: rows, **batch(7, 8)}
    kernels.run(kernel, buffers, (1, -(-rows // 8), 1), (32, 2, 1))
    assert_close(DECODE[dtype](out), values @ DECODE[dtype](x), dtype)


@pytest.mark.alike("dtype")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_qvm_and_qmm(rng, dtype, bits):
    group = 32
    kernels = library(
        AFFINE,
        [
            ("qvm", "affine_qvm", dtype, group, bits, "false"),
            ("qmm_t", "affine_qmm_t", dtype, group, bits, "false", "false"),
        ],
    )
    inner, columns = 70, 128  # vector times matrix: the groups lie along the columns of the result
    packed, scales, biases, values = quantized(rng, inner, columns, group, bits, dtype)
    x = ENCODE[dtype](rng.standard_normal(inner))
    out = np.zeros(columns, x.dtype)
    buffers = {0: packed, 1: scales, 2: biases, 3: x, 4: out, 5: inner, 6: columns, **batch(7, 8)}
    kernels.run("qvm", buffers, (1, columns // 64, 1), (32, 2, 1))
    assert_close(DECODE[dtype](out), DECODE[dtype](x) @ values, dtype)

    m, n, k = 37, 41, 96  # matrix times transposed matrix, ragged in both directions
    packed, scales, biases, values = quantized(rng, n, k, group, bits, dtype)
    x = ENCODE[dtype](rng.standard_normal((m, k)))
    out = np.zeros((m, n), x.dtype)
    buffers = {0: packed, 1: scales, 2: biases, 3: x, 4: out, 5: k, 6: n, 7: m, **batch(8, 8)}
    kernels.run("qmm_t", buffers, (-(-n // 32), -(-m // 32), 1), (32, 2, 2))
    assert_close(DECODE[dtype](out), DECODE[dtype](x) @ values.T, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp_qmv_and_dequantize(rng, dtype, mode):
    group, bits = MODES[mode]
    names = ("fp_qmv_fast", "fp_qmv")
    kernels = library(
        FLOATING,
        [(name, name, dtype, group, bits, "false") for name in names]
        + [("dequantize", "fp_dequantize", dtype, group, bits, "false")],
    )
    for name, rows, columns in (("fp_qmv_fast", 16, 512), ("fp_qmv", 13, 96)):
        packed, scales, values = fp_quantized(rng, rows, columns, mode)
        x = ENCODE[dtype](rng.standard_normal(columns))
        out = np.zeros(rows, x.dtype)
        buffers = {0: packed, 1: scales, 2: np.ones(1, np.float32), 3: x, 4: out, 5: columns, 6: rows, **batch(7, 7)}
        kernels.run(name, buffers, (1, -(-rows // 8), 1), (32, 2, 1))
        assert_close(DECODE[dtype](out), values @ DECODE[dtype](x), dtype)
    out = np.zeros(values.shape, x.dtype)
    grid = (values.size // (8 // bits), 1)
    buffers = {0: packed, 1: scales, 2: np.ones(1, np.float32), 3: out}
    kernels.run("dequantize", buffers, grid, (64, 1), dispatch="threads")
    np.testing.assert_array_equal(DECODE[dtype](out), values)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_dequantize(rng, dtype, bits):
    group, rows, columns = 32, 6, 128
    kernels = library(AFFINE, [("dequantize", "affine_dequantize", dtype, group, bits)])
    packed, scales, biases, values = quantized(rng, rows, columns, group, bits, dtype)
    out = np.zeros((rows, columns), scales.dtype)
    per_thread = {2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 8: 1}[bits]
    buffers = {0: packed, 1: scales, 2: biases, 3: out}
    kernels.run("dequantize", buffers, (columns // per_thread, rows), (32, 2), dispatch="threads")
    assert_close(DECODE[dtype](out), values, dtype)

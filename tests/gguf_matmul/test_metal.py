"""Metal kernels of matrices in GGUF's blocks, in the simulator: what test_op.py, which also runs there with
--backend simulator, does not reach."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from quantized_numpy import assert_rounded, dense_factor
from support import assert_same_bits, to_numpy

pytest.importorskip("gguf")

from gguf_blocks import BLOCKS, MODES, GgufMatrix

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
each_mode = pytest.mark.parametrize("mode", MODES)


def columns_of(mode: str) -> int:
    """No multiple of what a threadgroup takes at a time."""
    return 736 if BLOCKS[mode][1] == 32 else 768


@each_mode
@pytest.mark.parametrize("matrix_units", [False, True])
@pytest.mark.parametrize("transpose", [True, False])
def test_products(mode, matrix_units, transpose, rng):
    for rows, outputs in ((1, 37), (2, 300), (3, 65), (7, 41), (9, 33), (33, 70)):
        matrix = GgufMatrix.random(rng, mode, outputs, columns_of(mode))
        weights = matrix.weights.astype(np.float64)
        dtype = DTYPES[rng.integers(3)]
        x = mx.random.normal((rows, weights.shape[1 if transpose else 0])).astype(dtype)
        with mlx_anvil.simulate(matrix_units=matrix_units), mlx_anvil.strict():
            result = mlx_anvil.quantized_matmul(x, matrix.w, transpose=transpose, mode=mode)
            mx.eval(result)
        exact = to_numpy(x) @ (weights.T if transpose else weights)
        assert_rounded(result, exact, dtype, factor=dense_factor(rows, matrix_units))


@each_mode
def test_rows_have_the_same_bits_however_many(mode, rng):
    for outputs in (41, 9000):  # whose columns threadgroups share, or not
        matrix = GgufMatrix.random(rng, mode, outputs, 256)
        x = mx.random.normal((8, 256))
        with mlx_anvil.simulate():
            all_rows = mlx_anvil.quantized_gemv(x, matrix.w, mode=mode)
            for first, count in ((0, 1), (5, 1), (2, 3), (1, 7)):
                some = mlx_anvil.quantized_gemv(x[first : first + count], matrix.w, mode=mode)
                assert_same_bits(some, all_rows[first : first + count])


@each_mode
@pytest.mark.parametrize("offset", [1, 2, 8])
def test_bytes_that_are_not_aligned(mode, offset, rng):
    """Matrices that start anywhere in a buffer."""
    matrix = GgufMatrix.random(rng, mode, 19, columns_of(mode))
    buffer = mx.concatenate([mx.zeros((offset,), mx.uint8), matrix.w.flatten()])
    moved = buffer[offset:].reshape(matrix.w.shape)
    mx.eval(moved)
    for rows in (2, 5, 12):
        x, y = mx.random.normal((rows, columns_of(mode))), mx.random.normal((rows, 19))
        with mlx_anvil.simulate():
            for call in (
                lambda w, x=x: mlx_anvil.quantized_matmul(x, w, mode=mode),
                lambda w, y=y: mlx_anvil.quantized_matmul(y, w, transpose=False, mode=mode),
                lambda w: mlx_anvil.quantized_embedding(mx.array([3, -1]), w, mode=mode),
            ):
                assert_same_bits(call(moved), call(matrix.w))


@each_mode
def test_batches(mode, rng):
    matrix = GgufMatrix.random(rng, mode, 3, 21, columns_of(mode))
    weights = matrix.weights.astype(np.float64)
    for rows in (2, 5, 12):
        x, y = mx.random.normal((3, rows, columns_of(mode))), mx.random.normal((3, rows, 21))
        with mlx_anvil.simulate(), mlx_anvil.strict():
            product = mlx_anvil.quantized_matmul(x, matrix.w, mode=mode)
            plain = mlx_anvil.quantized_matmul(y, matrix.w, transpose=False, mode=mode)
            mx.eval(product, plain)
        assert_rounded(product, to_numpy(x) @ weights.swapaxes(-1, -2), mx.float32)
        assert_rounded(plain, to_numpy(y) @ weights, mx.float32)


@each_mode
def test_sums_that_overflow_are_computed_again(mode, rng):
    """Codes times x overflow, weights times x do not."""
    matrix = GgufMatrix.random(rng, mode, 33, columns_of(mode), scale=1e-4)
    for rows in (1, 3, 12):
        x = mx.random.normal((rows, columns_of(mode))) * 3e37
        y = mx.random.normal((rows, 33)) * 3e37
        with mlx_anvil.simulate():
            product = mlx_anvil.quantized_matmul(x, matrix.w, mode=mode)
            plain = mlx_anvil.quantized_matmul(y, matrix.w, transpose=False, mode=mode)
            mx.eval(product, plain)
        weights = matrix.weights.astype(np.float64)
        for result, exact in ((product, to_numpy(x) @ weights.T), (plain, to_numpy(y) @ weights)):
            representable = np.abs(exact) < 3e38
            assert np.isfinite(np.array(result))[representable].all()
            error = np.abs(np.array(result, np.float64) - exact)[representable].max()
            assert error < 1e-5 * np.abs(exact[representable]).max()

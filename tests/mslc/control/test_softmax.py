"""MLX's softmax and logsumexp kernels against NumPy."""

import numpy as np
import pytest

from tests.mslc.control.mlx_kernels import DECODE, ENCODE, assert_close, library


def row_threads(size):
    """Threads for one row: four elements each, in whole SIMD groups."""
    return (size + 127) // 128 * 32


@pytest.mark.parametrize("size", [5, 128, 1000, 4099])
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16_t"])
def test_softmax(rng, dtype, size):
    looped = size > 4096
    function = "softmax_looped" if looped else "softmax_single_row"
    kernels = library(["softmax.h"], [("softmax", function, dtype, "float")])
    x = ENCODE[dtype](3 * rng.standard_normal((3, size)))
    out = np.zeros_like(x)
    threads = 1024 if looped else row_threads(size)
    kernels.run("softmax", {0: x, 1: out, 2: size}, (3 * threads,), (threads,), dispatch="threads")
    values = DECODE[dtype](x)
    weights = np.exp(values - values.max(-1, keepdims=True))
    assert_close(DECODE[dtype](out), weights / weights.sum(-1, keepdims=True), dtype)


@pytest.mark.parametrize("size", [7, 1024])
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16_t"])
def test_logsumexp(rng, dtype, size):
    kernels = library(["logsumexp.h"], [("logsumexp", "logsumexp", dtype)])
    x = ENCODE[dtype](3 * rng.standard_normal((3, size)))
    out = np.zeros(3, x.dtype)
    threads = row_threads(size)
    kernels.run("logsumexp", {0: x, 1: out, 2: size}, (3 * threads,), (threads,), dispatch="threads")
    assert_close(DECODE[dtype](out), np.log(np.exp(DECODE[dtype](x)).sum(-1)), dtype)

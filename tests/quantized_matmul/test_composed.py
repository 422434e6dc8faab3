"""Graphs of MLX ops in the place of the kernels, which MLX's own faults must not reach."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu_only  # which those faults are of

EMPTY_PRODUCTS = """
import mlx.core as mx
import numpy as np

import mlx_anvil

arrays = [mx.zeros((0, 16), mx.uint32), mx.zeros((0, 2)), mx.zeros((0, 2))]


def product(x):
    return mlx_anvil.quantized_matmul(x, *arrays, group_size=64, bits=4)


with mx.stream(mx.cpu), mlx_anvil.composed():
    views, big = mx.contiguous(mx.ones((256, 256)))[:, ::2], mx.ones((640, 640))
    mx.eval(views, big)
    for result in (
        lambda: product(views),
        lambda: mx.jvp(product, [views], [views])[1][0],
        lambda: mx.vmap(product)(views[None]),
        lambda: mx.vmap(lambda tangent: mx.jvp(product, [views], [tangent])[1][0])(views[None]),
    ):
        mx.async_eval(big @ big @ big, result())  # the first product keeps the stream busy
        zeros = mx.array(np.zeros((256, 128), np.float32))
        mx.synchronize()
        print(mx.abs(zeros).max().item())
"""


def test_products_of_no_rows_write_nowhere_else():
    """MLX 0.32.4 copies the strided factor of such a product to memory that it has freed (docs/mlx-bugs.md). A
    process of its own, whose memory that is."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", EMPTY_PRODUCTS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["0.0"] * 4

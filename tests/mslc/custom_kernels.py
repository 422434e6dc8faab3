"""Helpers that run kernels of mlx_anvil.mslc.metal_kernel and compare their results."""

import mlx.core as mx
import numpy as np

from mlx_anvil.mslc import metal_kernel

EXP_STRIDED = """
    uint elem = thread_position_in_grid.x;
    uint loc = elem_to_loc(elem, inp_shape, inp_strides, inp_ndim);
    T tmp = inp[loc];
    out[elem] = metal::exp(tmp);
"""


def normal(rng, shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def same(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert mx.array_equal(a, b), (a, b)


def close(a, b, tolerance):
    """Checks equality up to a fraction of the largest magnitude."""
    assert a.shape == b.shape
    error = mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()
    assert error <= tolerance * max(1.0, mx.abs(b.astype(mx.float32)).max().item()), error


def run(kernel, inputs, outputs, grid, threadgroup=(32, 1, 1), **options):
    """`outputs` are (shape, dtype) pairs."""
    return kernel(
        inputs=inputs,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        grid=grid,
        threadgroup=threadgroup,
        **options,
    )


def elementwise(source, inputs, dtype=mx.float32, count=None, names=None, **options):
    names = names or [f"in{i}" for i in range(len(inputs))]
    kernel = metal_kernel("elementwise", names, ["out"], source, simulate=True)
    count = count or inputs[0].size
    return run(kernel, inputs, [((count,), dtype)], (count, 1, 1), **options)[0]

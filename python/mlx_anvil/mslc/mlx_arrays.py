"""Converts MLX arrays to memory that the simulator can bind, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

# NumPy has no bfloat16, so its bits travel as uint16.
_SAME_NAME = ("float16", "float32", "complex64", *(f"{s}int{bits}" for s in ("", "u") for bits in (8, 16, 32, 64)))
_NUMPY: dict[mx.Dtype, np.dtype] = {
    mx.bool_: np.dtype(np.bool_),
    mx.bfloat16: np.dtype(np.uint16),
    **{getattr(mx, name): np.dtype(name) for name in _SAME_NAME},
}


@dataclass(frozen=True)
class BoundInput:
    """The memory of an input as a flat array that starts at its first element, and its layout in elements."""

    memory: np.ndarray
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def bind_input(array: mx.array, row_contiguous: bool) -> BoundInput:
    """Evaluates `array`. A strided view is bound without a copy, unless `row_contiguous` requires one."""
    view = _as_numpy(array)
    # A view with negative strides starts inside its buffer, where no binding can start. It is copied, and the kernel
    # gets the strides of the copy.
    if (row_contiguous and not view.flags.c_contiguous) or any(stride < 0 for stride in view.strides):
        view = np.ascontiguousarray(view)
    itemsize = view.itemsize
    strides = tuple(stride // itemsize for stride in view.strides)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, strides, strict=True)) if view.size else 0
    memory = np.lib.stride_tricks.as_strided(view, (extent,), (itemsize,), writeable=False)
    return BoundInput(_as_aligned(memory), view.shape, strides)


def new_output(shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> np.ndarray:
    """Allocates an output filled with `init_value`, or else with NaNs or ones.

    That way, elements that a kernel forgets to write do not look like results."""
    if init_value is not None:
        # mx.full(..., dtype) cannot convert every value to every dtype.
        filled = mx.full(tuple(shape), float(init_value), stream=mx.cpu).astype(dtype, stream=mx.cpu)
        return np.array(_as_numpy(filled), order="C", copy=True)
    if dtype == mx.bool_:
        return np.ones(tuple(shape), np.bool_)
    memory = np.empty(tuple(shape), _NUMPY[dtype])
    memory.reshape(-1).view(np.uint8).fill(0xFF)
    return memory


def to_mlx(memory: np.ndarray, dtype: mx.Dtype) -> mx.array:
    # mx.array copies the memory, so the result owns its data.
    array = mx.array(memory)
    return array.view(mx.bfloat16, stream=mx.cpu) if dtype == mx.bfloat16 else array


_LARGEST_VECTOR = 16  # in bytes, for vectors with elements of up to 32 bits


def _as_aligned(memory: np.ndarray) -> np.ndarray:
    """Copies an array that starts inside an MLX buffer to the same offset in a NumPy buffer."""
    offset = (memory.ctypes.data - _start_of_mlx_buffers()) % _LARGEST_VECTOR
    if not offset:
        return memory
    placed = np.empty(offset + memory.nbytes, np.uint8)[offset:].view(memory.dtype)
    placed[...] = memory
    return placed


@cache
def _start_of_mlx_buffers() -> int:
    """Measures how whole arrays are aligned relative to the largest vector, since MLX does not expose offsets."""
    whole = mx.arange(64, stream=mx.cpu)
    return int(_as_numpy(whole).ctypes.data % _LARGEST_VECTOR)


def _as_numpy(array: mx.array) -> np.ndarray:
    """Returns a view of the array's memory, with its strides."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16, stream=mx.cpu)
    try:
        mx.eval(array)
    except (RuntimeError, ValueError) as error:
        if "transformations" not in str(error):
            raise
        message = "[metal_kernel] The simulator needs values; there are none inside mx.compile and mx.vmap."
        raise ValueError(message) from None
    return np.asarray(array)

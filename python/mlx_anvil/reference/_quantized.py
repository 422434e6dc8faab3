"""Shared parts of the definitions and entries of the ops on quantized matrices."""

import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

# No infinities: the kernels compute scale * sum(code * x) + bias * sum(x), which multiplies 0 by infinity where the
# definition does not.
SPECIAL_VALUES = (math.nan, 0.0, -0.0)


def dequantized(
    w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str
) -> mx.array:
    """The matrix of a quantized ``w`` ``[rows, columns]``: ``codes * scales + biases``, with one scale and bias per
    group.
    """
    with mx.stream(mx.cpu):
        ones, zeros = (scales, None) if biases is None else (mx.ones(scales.shape), mx.zeros(scales.shape))
        rows = w.shape[0]
        if mode == "nvfp4":  # on the CPU, MLX 0.32.4 rejects an odd number of groups
            w, ones = (mx.concatenate([x, x]) for x in (w, ones))
        codes = mx.dequantize(w, ones, zeros, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)[:rows]
    if biases is None:
        return codes
    codes = codes.astype(mx.result_type(scales, biases))
    return codes * mx.repeat(scales, group_size, axis=-1) + mx.repeat(biases, group_size, axis=-1)


# ---- a shape is (rows of x, outputs, groups of 64) -------------------------------------------------------------------


@cache
def quantized_codes(outputs: int, groups: int, bits: int, copy: int = 0) -> mx.array:
    """Random codes that depend on the arguments alone, so that a function of the float arguments can remake them."""
    draw = random.Random(copy)
    return mx.array([[draw.getrandbits(32) for _ in range(groups * 2 * bits)] for _ in range(outputs)], mx.uint32)


def quantized_inputs(shape: tuple[int, ...], dtype: mx.Dtype, transpose: bool = True) -> list[mx.array]:
    """Random ``x``, ``scales`` and ``biases``."""
    rows, outputs, groups = shape
    x = mx.random.normal((rows, groups * 64 if transpose else outputs))
    scales = 0.02 * mx.random.normal((outputs, groups))
    biases = 0.1 * mx.random.normal((outputs, groups))
    return [a.astype(dtype) for a in (x, scales, biases)]


def with_codes(function: Callable[..., mx.array], bits: int, **options: Any) -> Callable[..., mx.array]:
    """The op as a function of its floating-point arguments."""

    def of_floats(x: mx.array, scales: mx.array, biases: mx.array, **more: Any) -> mx.array:
        return function(x, quantized_codes(*biases.shape, bits), scales, biases, bits=bits, **options, **more)

    return of_floats

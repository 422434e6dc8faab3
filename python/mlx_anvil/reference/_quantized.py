"""What the definitions and the entries of the ops on quantized matrices share."""

import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

# Without infinities: scale * sum(code * x) + bias * sum(x) takes 0 times infinity where the definition does not.
SPECIAL_VALUES = (math.nan, 0.0, -0.0)


def dequantized(
    w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str
) -> mx.array:
    with mx.stream(mx.cpu):
        ones, zeros = (scales, None) if biases is None else (mx.ones(scales.shape), mx.zeros(scales.shape))
        rows = w.shape[0]
        if mode == "nvfp4":  # of which MLX 0.32.4 takes no odd number of groups on the CPU
            w, ones = (mx.concatenate([x, x]) for x in (w, ones))
        codes = mx.dequantize(w, ones, zeros, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)[:rows]
    if biases is None:
        return codes
    codes = codes.astype(mx.result_type(scales, biases))
    return codes * mx.repeat(scales, group_size, axis=-1) + mx.repeat(biases, group_size, axis=-1)


# ---- a shape is (rows of x, outputs, groups of 64) -------------------------------------------------------------------


@cache
def quantized_codes(outputs: int, groups: int, bits: int, copy: int = 0) -> mx.array:
    """Codes that depend on the shape only, so that those of a call can be made again from its arguments."""
    draw = random.Random(copy)
    return mx.array([[draw.getrandbits(32) for _ in range(groups * 2 * bits)] for _ in range(outputs)], mx.uint32)


def quantized_inputs(shape: tuple[int, ...], dtype: mx.Dtype, transpose: bool = True) -> list[mx.array]:
    rows, outputs, groups = shape
    x = mx.random.normal((rows, groups * 64 if transpose else outputs))
    scales = 0.02 * mx.random.normal((outputs, groups))
    biases = 0.1 * mx.random.normal((outputs, groups))
    return [a.astype(dtype) for a in (x, scales, biases)]


def with_codes(function: Callable[..., mx.array], bits: int, **options: Any) -> Callable[..., mx.array]:
    """As a function of its floating-point arguments."""

    def of_floats(x: mx.array, scales: mx.array, biases: mx.array, **more: Any) -> mx.array:
        return function(x, quantized_codes(*biases.shape, bits), scales, biases, bits=bits, **options, **more)

    return of_floats

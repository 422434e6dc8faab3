"""Quantized keys and values in the definition of flash_attention, and their entries in the registry."""

import math
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx

from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference._quantized import SPECIAL_VALUES, dequantized

KeysOrValues = mx.array | tuple[mx.array, ...] | list[mx.array]

# The group size and bits that a mode has by default.
DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


def as_arrays(
    q: mx.array,
    k: KeysOrValues,
    v: KeysOrValues,
    group_size: int | None,
    bits: int | tuple[int, int] | None,
    mode: str,
) -> tuple[mx.array, mx.array, mx.array]:
    """``q``, ``k`` and ``v`` in the dtype of the result, dequantized."""
    if isinstance(k, mx.array) or isinstance(v, mx.array):
        return q, cast(mx.array, k), cast(mx.array, v)
    group_size = group_size or DEFAULTS[mode][0]
    pair = bits if isinstance(bits, tuple | list) else (bits or DEFAULTS[mode][1],) * 2
    keys, values = (_dequantized(x, group_size, b, mode) for x, b in zip((k, v), pair, strict=True))
    dtype = mx.result_type(q, keys, values) if mode == "affine" else q.dtype
    return q.astype(dtype), keys.astype(dtype), values.astype(dtype)


def _dequantized(parts: tuple[mx.array, ...] | list[mx.array], group_size: int, bits: int, mode: str) -> mx.array:
    w, scales = parts[:2]
    if w.size == 0:  # MLX dequantizes no empty matrix
        dtype = mx.result_type(*parts[1:]) if mode == "affine" else mx.float32
        return mx.zeros((*scales.shape[:-1], scales.shape[-1] * group_size), dtype)
    rows = [mx.flatten(x, 0, -2) for x in parts]
    values = dequantized(rows[0], rows[1], rows[2] if len(rows) > 2 else None, group_size, bits, mode)
    return mx.unflatten(values, 0, scales.shape[:-1])


# ---- a shape is (batch, q heads, kv heads, q length, kv length, groups per head) -------------------------------------


@cache
def _random_codes(shape: tuple[int, ...], copy: int) -> mx.array:
    """Random words that depend on the arguments alone, so that a function of the float arguments can remake them."""
    data = random.Random(copy).randbytes(4 * math.prod(shape))
    return mx.array(list(memoryview(data).cast("I")), mx.uint32).reshape(shape)


def _inputs(shape: tuple[int, ...], dtype: mx.Dtype, group_size: int, bits: tuple[int, int]) -> list[mx.array]:
    """``q``, then scales and biases of ``k`` and of ``v``."""
    batch, q_heads, kv_heads, q_len, kv_len, groups = shape
    arrays = [mx.random.normal((batch, q_heads, q_len, groups * group_size))]
    for b in bits:
        arrays.append(2.0 / 2**b * mx.random.normal((batch, kv_heads, kv_len, groups)))
        arrays.append(mx.random.normal((batch, kv_heads, kv_len, groups)))
    return [x.astype(dtype) for x in arrays]


def _of_floats(
    attention: Callable[..., Any], group_size: int, bits: tuple[int, int], **options: Any
) -> Callable[..., mx.array]:
    """Attention over affine keys and values as a function of its floating-point arguments."""

    def function(q: mx.array, *numbers: mx.array, **more: Any) -> mx.array:
        parts = []
        for copy, b in enumerate(bits):
            scales, biases = numbers[2 * copy : 2 * copy + 2]
            width = scales.shape[-1] * group_size * b // 32
            parts.append((_random_codes((*scales.shape[:-1], width), copy), scales, biases))
        result = attention(q, *parts, kv_group_size=group_size, kv_bits=bits, **options, **more)
        return cast(mx.array, result)

    return function


def _spec(variant: str, arguments: tuple[str, ...], **fields: Any) -> OpSpec:
    return OpSpec(
        name="flash_attention", variant=variant, arguments=arguments, operands=("q",), float32_tolerance=2e-5, **fields
    )


def specs(attention: Callable[..., Any], definition: Callable[..., Any]) -> tuple[OpSpec, ...]:
    """The entries, of the op and its definition. Affine: MLX exports no graph that dequantizes the other formats."""
    affine: tuple[tuple[str, int, tuple[int, int], dict[str, Any]], ...] = (
        ("4 bits", 64, (4, 4), {}),
        ("8 and 4 bits", 32, (8, 4), {"window_size": (40, 9), "softcap": 3.0}),
    )
    return tuple(
        _spec(
            f"quantized, {name}",
            ("q", "k_scales", "k_biases", "v_scales", "v_biases"),
            function=_of_floats(attention, group_size, bits, **options),
            reference=_of_floats(definition, group_size, bits, **options),
            make_inputs=partial(_inputs, group_size=group_size, bits=bits),
            contract_shapes=(
                (1, 1, 1, 3, 7, 1),  # one row over few keys may have gradients that cancel
                (0, 2, 1, 3, 5, 1),
                (2, 2, 1, 0, 5, 1),
                (1, 2, 2, 3, 0, 1),
                (1, 4, 2, 37, 70, 3),
                (2, 4, 2, 5, 31, 1),
                (2, 4, 2, 11, 31, 1),
            ),
            check_shapes=((1, 4, 2, 37, 70, 2), (1, 32, 8, 1, 2048, 128 // group_size)),
            special_values=SPECIAL_VALUES,
        )
        for name, group_size, bits, options in affine
    )

"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import FEW_TOKENS, MODEL_DTYPES, PROMPT, Call, for_matrix_units


def _arrays(
    steps: int,
    heads: tuple[int, int],
    key_dim: int,
    dtype: mx.Dtype,
    *,
    per_channel: bool,
    g: mx.Dtype = mx.float32,
    beta: mx.Dtype = mx.float32,
) -> list[mx.array]:
    """As models have them: q, k and v are slices of one array."""
    key_heads, value_heads = heads
    mixed = mx.zeros((1, steps, 2 * key_heads + value_heads, key_dim), dtype)
    of_gates = (1, steps, value_heads)
    return [
        *mx.split(mixed, [key_heads, 2 * key_heads], axis=2),
        mx.zeros((*of_gates, key_dim) if per_channel else of_gates, g),
        mx.zeros(of_gates, beta),
        mx.zeros((1, value_heads, key_dim, key_dim)),
    ]


def _calls(arrays: list[mx.array], **options: Any) -> Iterator[Call]:
    """The op, and its gradients."""

    def loss(*given: mx.array) -> mx.array:
        return sum((x.sum() for x in mlx_anvil.gated_delta(*given, **options)), mx.zeros(()))

    yield lambda: mlx_anvil.gated_delta(*arrays, **options)
    yield lambda: mx.grad(loss, argnums=tuple(range(len(arrays))))(*arrays)


def _gates(*arrays: mx.array, **options: Any) -> Iterator[Call]:
    """The op, and its gradients with those of the weights and without."""

    def loss(*given: mx.array) -> mx.array:
        return sum((x.sum() for x in mlx_anvil.gated_delta_gates(*given, **options)), mx.zeros(()))

    yield lambda: mlx_anvil.gated_delta_gates(*arrays, **options)
    yield lambda: mx.grad(loss, argnums=(0, 1, 2, 3))(*arrays)
    yield lambda: mx.grad(loss, argnums=(0, 1))(*arrays)


def every_kernel() -> Iterator[Call]:
    for dtype, key_dim, per_channel in product(DTYPES, (48, 64, 112, 128, 256), (False, True)):
        yield from _calls(_arrays(20, (1, 2), key_dim, dtype, per_channel=per_channel))
    for key_dim, per_channel in product((64, 128), (False, True)):
        arrays = _arrays(20, (1, 2), key_dim, mx.bfloat16, per_channel=per_channel)
        for call in _calls(arrays):
            yield for_matrix_units(call)
            yield for_matrix_units(call, group_products=True)
    for dtype, per_channel, g, beta in product(DTYPES, (False, True), *((True, False),) * 2):
        gates = {"g": mx.float32 if g else dtype, "beta": mx.float32 if beta else dtype}
        arrays = _arrays(3, (1, 2), 64, dtype, per_channel=per_channel, **gates)
        for with_state, lengths, positions, eps in product(
            (True, False), (None, mx.array([2])), (None, [1]), (None, 1.0)
        ):
            yield from _calls(
                arrays if with_state else arrays[:-1], lengths=lengths, return_states=positions, normalize_eps=eps
            )

    for dtype, log, bias, bound in product(DTYPES, (True, False), (True, False), (None, -5.0)):
        weights = [mx.zeros((4,), mx.float32 if is_float32 else dtype) for is_float32 in (log, bias)]
        x = mx.zeros((1, 3, 4), dtype)
        yield from _gates(x, x, *weights, lower_bound=bound)


def of_models() -> Iterator[Call]:
    for dtype, bias in product(MODEL_DTYPES, (True, False)):
        a, log = mx.zeros((1, 1, 32), dtype), mx.zeros((32,))
        dt_bias = log if bias else log.astype(dtype)
        yield from _gates(a, a, log, dt_bias)
        per_channel = mx.zeros((1, 1, 32, 128), dtype), a, log, mx.zeros((32, 128), dt_bias.dtype)
        yield from _gates(*per_channel)
        yield from _gates(*per_channel, lower_bound=-5.0)
    # Qwen 3 Next and Qwen 3.5; Kimi Linear. They normalise q and k before the op, or leave it to the op.
    for dtype, (heads, per_channel), eps in product(MODEL_DTYPES, (((16, 32), False), ((32, 32), True)), (None, 1e-6)):
        for steps, options in (
            (1, {}),
            (FEW_TOKENS, {"return_states": list(range(FEW_TOKENS))}),
            (PROMPT, {"lengths": mx.array([77])}),
        ):
            arrays = _arrays(steps, heads, 128, dtype, per_channel=per_channel)
            yield partial(mlx_anvil.gated_delta, *arrays, normalize_eps=eps, **options)
        # The beginning of a prompt, and a step of training.
        yield from _calls(_arrays(PROMPT, heads, 128, dtype, per_channel=per_channel)[:-1], normalize_eps=eps)

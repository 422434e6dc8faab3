"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

from mlx_anvil import causal_conv1d
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import MODEL_DTYPES, PROMPT, WIDTH, Call


def every_kernel() -> Iterator[Call]:
    for dtype, width in product(DTYPES, range(2, 9)):
        x, d_y = (mx.zeros((2, 9, 12), dtype) for _ in range(2))
        state, d_state = (mx.zeros((2, width - 1, 12), dtype) for _ in range(2))
        weight, bias = mx.zeros((12, width), dtype), mx.zeros((12,), dtype)
        yield partial(mx.vjp, causal_conv1d, [x, weight, bias, state], [d_y, d_state])
        yield partial(mx.vjp, partial(causal_conv1d, activation=None), [x[..., :5], weight[:5]], [d_y[..., :5], d_state[..., :5]])  # fmt: skip
        yield partial(causal_conv1d, x, weight, lengths=mx.array([3, 9]))


def of_models() -> Iterator[Call]:
    """Qwen3-Next and Kimi Linear (no bias), Mamba 2 and Jamba (with one), LFM2 (width 3, no activation)."""
    for dtype, (width, has_bias, activation) in product(
        MODEL_DTYPES, ((4, False, "silu"), (4, True, "silu"), (3, False, None))
    ):
        weight, bias = mx.zeros((WIDTH, width), dtype), mx.zeros((WIDTH,), dtype) if has_bias else None
        function = partial(causal_conv1d, activation=activation)
        for length, has_state in ((PROMPT, False), (PROMPT, True), (1, True)):
            x = mx.zeros((1, length, WIDTH), dtype)
            state = mx.zeros((1, width - 1, WIDTH), dtype)
            yield partial(function, x, weight, bias, state if has_state else None)
        x, lengths = mx.zeros((2, PROMPT, WIDTH), dtype), mx.array([PROMPT, 9])
        state = mx.zeros((2, width - 1, WIDTH), dtype)
        yield partial(function, x, weight, bias, state, lengths=lengths)  # a batch of prompts
        arrays = [x, weight, *([bias] if has_bias else [])]
        yield partial(mx.vjp, function, arrays, [x, state])
        yield partial(mx.vjp, lambda x, w=weight, b=bias, f=function: f(x, w, b), [x], [x, state])  # frozen weights

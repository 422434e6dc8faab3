"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    MODEL_DTYPES,
    WIDTH,
    Call,
)


def every_kernel() -> Iterator[Call]:
    for dtype, activation in product(DTYPES, ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")):
        function = partial(mlx_anvil.gated, activation=activation)
        whole = [mx.zeros((6, 10), dtype) for _ in range(4)]
        for a, b, c, d in (whole, [x[:, ::2] for x in whole]):
            yield partial(mx.vjp, function, [a, b], [c])
            yield partial(mx.jvp, function, [a, b], [c, d])


def of_models() -> Iterator[Call]:
    """Gemma 1 (gelu) to 4, BitNet, GPT-OSS, and the clamped SwiGLU of DeepSeek V4."""
    for dtype, activation in product(MODEL_DTYPES, ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")):
        gate, up, out = (mx.zeros((8, WIDTH), dtype) for _ in range(3))
        function = partial(mlx_anvil.gated, activation=activation)
        yield partial(function, gate, up)
        yield partial(mx.vjp, function, [gate, up], [out])

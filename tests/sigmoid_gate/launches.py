"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    MODEL_DTYPES,
    WIDTH,
    Call,
)


def every_kernel() -> Iterator[Call]:
    for dtype in DTYPES:
        whole = [mx.zeros((6, 10), dtype) for _ in range(4)]
        for a, b, c, d in (whole, [x[:, ::2] for x in whole]):
            yield lambda a=a, b=b, c=c: mx.vjp(mlx_anvil.sigmoid_gate, [a, b], [c])
            yield lambda a=a, b=b, c=c, d=d: mx.jvp(mlx_anvil.sigmoid_gate, [a, b], [c, d])


def of_models() -> Iterator[Call]:
    """The output gate of attention in Qwen3-Next: queries and gates are the halves of one product."""
    for dtype in MODEL_DTYPES:
        whole = [mx.zeros((8, WIDTH), dtype) for _ in range(3)]
        for x, gate in (whole[:2], mx.split(mx.zeros((8, 2 * WIDTH), dtype), 2, axis=-1)):
            yield partial(mlx_anvil.sigmoid_gate, x, gate)
            yield partial(mx.vjp, mlx_anvil.sigmoid_gate, [x, gate], whole[2:])

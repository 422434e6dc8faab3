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
    for dtype in MODEL_DTYPES:
        whole = [mx.zeros((8, WIDTH), dtype) for _ in range(3)]
        halves = mx.split(mx.zeros((8, 2 * WIDTH), dtype), 2, axis=-1)  # gate and up of one product: Phi 3
        for gate, up in (whole[:2], halves):
            yield partial(mlx_anvil.sigmoid_gate, gate, up)
            yield partial(mx.vjp, mlx_anvil.sigmoid_gate, [gate, up], whole[2:])
    x = mx.zeros((8, WIDTH))  # in float32 in some models, whatever their weights are
    yield partial(mlx_anvil.sigmoid_gate, x, x)
    yield partial(mx.vjp, mlx_anvil.sigmoid_gate, [x, x], [x])

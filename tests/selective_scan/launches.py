"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx

from mlx_anvil import selective_scan
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import MODEL_DTYPES, Call


def _arrays(dtype: mx.Dtype, steps: int, channels: int, states: int) -> list[mx.array]:
    rows = [mx.zeros((1, steps, channels), dtype) for _ in range(2)]
    return [*rows, mx.zeros((channels, states)), *(mx.zeros((1, steps, states), dtype) for _ in range(2))]


def _gradient(arrays: list[mx.array], d_y: mx.array, state: mx.array, **options: Any) -> list[mx.array]:
    def scan(*values: mx.array) -> list[mx.array]:
        return list(selective_scan(*values[:-1], state=values[-1], **options))

    return mx.vjp(scan, [*arrays, state], [d_y, state])[1]


def every_kernel() -> Iterator[Call]:
    for dtype in DTYPES:
        arrays = _arrays(dtype, 3, 5, 4)
        d, z, state = mx.zeros((5,)), mx.zeros((1, 3, 5), dtype), mx.zeros((1, 5, 4))
        for own_d, own_z, own_state, softplus, lengths in product(
            (None, d), (None, z), (None, state), (False, True), (None, mx.array([2]))
        ):
            options = {"D": own_d, "z": own_z, "dt_softplus": softplus, "lengths": lengths}
            scan = partial(selective_scan, **options, state=own_state)
            yield partial(scan, *arrays)
            yield partial(mx.vjp, lambda *x, scan=scan: list(scan(*x)), arrays, [z, state])


def of_models() -> Iterator[Call]:
    """Mamba, Falcon-Mamba and Jamba: a prompt and a step."""
    for dtype in MODEL_DTYPES:
        for steps in (32, 1):
            arrays = _arrays(dtype, steps, 256, 16)
            d, z = mx.zeros((256,)), mx.zeros((1, steps, 256), dtype)
            state = mx.zeros((1, 256, 16))
            for softplus, gate in product((False, True), (None, z)):
                scan = partial(selective_scan, *arrays, d, gate, dt_softplus=softplus)
                yield scan
                yield partial(scan, state=state)
            yield partial(_gradient, [*arrays, d, z], z, state, dt_softplus=True)

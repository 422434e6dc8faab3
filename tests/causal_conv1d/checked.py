"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

import mlx_anvil
from checked_calls import Checked, any_dtype
from mlx_anvil.reference import causal_conv1d
from support import GRADIENT_FACTOR, assert_accurate, vjp_of


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    """Each width with and without a bias, a state, lengths and the activation; aligned and odd channels."""
    for width in range(2, 9):
        for channels, full in ((12, True), (5, False)):
            yield Checked(partial(both_ways, width, channels, full, any_dtype(rng)))


def both_ways(width: int, channels: int, full: bool, dtype: mx.Dtype) -> None:
    shapes = [(2, 7, channels), (channels, width)]
    shapes += [(channels,), (2, width - 1, channels)] if full else []
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    options = {"activation": "silu" if full else None, "lengths": mx.array([3, 9]) if full else None}
    ours, exact = partial(mlx_anvil.causal_conv1d, **options), partial(causal_conv1d, **options)
    assert_accurate(ours, exact, arrays)
    cotangents = [mx.random.normal((2, rows, channels)).astype(dtype) for rows in (7, width - 1)]
    count = len(arrays)
    gradients = vjp_of(ours, count), vjp_of(exact, count)
    assert_accurate(*gradients, [*arrays, *cotangents], factor=GRADIENT_FACTOR)

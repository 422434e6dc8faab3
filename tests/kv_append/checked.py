"""Small calls that run every kernel template of the op, for the checked simulator."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

import mlx_anvil
from checked_calls import Checked, any_dtype, each_way
from mlx_anvil.reference import kv_append
from support import assert_same_bits


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    yield from each_way(rng, "kv_append", (2, 3, 11, 26))
    yield Checked(partial(quantized, any_dtype(rng, (mx.float32,)), int(rng.integers(2, 7))))


def quantized(dtype: mx.Dtype, bits: int) -> None:
    """No ties among random float32 numbers: MLX's CPU rounds them to even, and its GPUs away from zero."""
    k, v = (mx.random.normal((2, 3, 5, 96)).astype(dtype) for _ in range(2))
    caches = [mx.quantize(mx.random.normal((2, 3, 9, 96)).astype(dtype), 32, bits) for _ in range(2)]
    slots = mx.array([[3, -1, 8, 3, 0], [9999, 1, 1, 2, 0]]) + 0  # not known at the call: dropped
    options = {"slots": slots, "kv_group_size": 32, "kv_bits": bits}
    mx.eval(caches)
    ours = mlx_anvil.kv_append(*caches, k, v, **options)
    with mx.stream(mx.cpu):
        expected = kv_append(*caches, k, v, **options)
    for side, wanted in zip(ours, expected, strict=True):
        for a, b in zip(side, wanted, strict=True):
            assert_same_bits(a, b)

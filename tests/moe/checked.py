"""Small calls that run every kernel template of the ops, for the checked simulator."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

import mlx_anvil
from checked_calls import Checked, any_dtype, each_way
from mlx_anvil import reference
from support import assert_same_bits, max_error, normal


def sorts(tokens: int, k: int, columns: int, experts: int, dtype: mx.Dtype) -> None:
    """Compares the integers too, which the registry's entries do not return."""
    x = normal(tokens, columns, dtype=dtype)
    ids = mx.random.randint(-experts - 2, experts + 2, (tokens, k))  # lazy, so that some may be out of range
    ours = mlx_anvil.moe_permute(x, ids, experts)
    wanted = reference.moe_permute(x, ids, experts)
    assert all(mx.array_equal(a, b) for a, b in zip(ours[1:], wanted[1:], strict=True))
    assert_same_bits(ours[0], wanted[0])


def batches(tokens: int, experts: int) -> None:
    """Elements of vmap are sorted on their own, in the same launches."""
    x, ids = normal(3, tokens, 9), mx.random.randint(0, experts, (3, tokens, 2))
    permute = partial(mlx_anvil.moe_permute, num_experts=experts)
    for index, result in enumerate(mx.vmap(permute)(x, ids)):
        singles = [reference.moe_permute(x[i], ids[i], experts)[index] for i in range(3)]
        assert max_error(result, mx.stack(singles)) == 0


def every_template(rng: np.random.Generator) -> Iterator[Checked]:
    yield from each_way(rng, "moe_permute", (5, 40))
    yield from each_way(rng, "moe_permute/many experts", (300, 24))  # more pairs than are sorted at once
    yield from each_way(rng, "moe_combine", (5, 3, 33))
    yield from each_way(rng, "moe_combine/all terms", (5, 6, 24))
    for columns in (16, 13, 0):
        for dtype in (mx.float32, any_dtype(rng, (mx.float16, mx.bfloat16))):
            yield Checked(partial(sorts, 7, 3, columns, 11, dtype))
            yield Checked(partial(sorts, 650, 2, columns, int(rng.integers(1, 600)), dtype))
    yield Checked(partial(batches, 5, 4))
    yield Checked(partial(batches, 520, 40))

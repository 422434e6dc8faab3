"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import LONG_CACHE, MODEL_DTYPES, PROMPT, Call, projected_heads


def every_kernel() -> Iterator[Call]:
    for dtype, traditional, given in product(DTYPES, (False, True), (False, True)):
        rope = {"dims": 8, "traditional": traditional, "freqs": mx.ones((4,)) if given else None}
        k, cache = mx.zeros((2, 3, 3, 64), dtype), mx.zeros((2, 3, 7, 64), dtype)
        yield partial(mlx_anvil.kv_append, cache, cache, k, k, offset=1, rope=rope)
        parts = mx.quantize(cache, 64, 4)
        yield partial(mlx_anvil.kv_append, parts, parts, k, k, offset=1, rope=rope, kv_bits=4)


def of_models() -> Iterator[Call]:
    dim = 128
    for dtype, length in product(MODEL_DTYPES, (PROMPT, 1)):
        k = projected_heads(dtype, 2, length, dim)
        cache = mx.zeros((1, 2, LONG_CACHE, dim), dtype)
        parts = mx.quantize(cache, 64, 4)
        for rope in (None, {"dims": dim}, {"dims": dim, "freqs": mx.ones((dim // 2,))}):
            yield partial(mlx_anvil.kv_append, cache, cache, k, k, offset=0, rope=rope)
            yield partial(mlx_anvil.kv_append, parts, parts, k, k, offset=0, rope=rope, kv_bits=4)

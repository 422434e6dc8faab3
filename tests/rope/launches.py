"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    LONG_CACHE,
    MODEL_DTYPES,
    PROMPT,
    Call,
    for_matrix_units,
    projected_heads,
)


def every_kernel() -> Iterator[Call]:
    for dtype, dim, traditional, given in product(DTYPES, (32, 13), (False, True), (False, True)):
        q, k = mx.zeros((2, 4, 3, dim), dtype), mx.zeros((2, 1, 3, dim), dtype)
        freqs = mx.ones((4,)) if given else None
        options = {
            "dims": 8,
            "traditional": traditional,
            "freqs": freqs,
        }
        options["offset"] = mx.array([1, 2], mx.int64 if traditional else mx.int32)
        yield lambda q=q, o=options: mx.vjp(lambda q: mlx_anvil.rope(q, **o), [q], [q])
        yield lambda q=q, k=k, o=options: mlx_anvil.rope_qk(q, k, **o)
        cache = mx.zeros((2, 1, 7, dim), dtype)
        yield lambda q=q, k=k, c=cache, o=options: mlx_anvil.rope_and_cache(q, k, k, c, c, **o)
    # Many rows of whole heads: NVIDIA GPUs share angles.
    for dtype, traditional in product(DTYPES, (False, True)):
        q, k = (mx.zeros((1, count, 1024, 32), dtype) for count in (33, 2))
        options = {"dims": 32, "traditional": traditional, "base": 1e4}
        yield for_matrix_units(partial(mlx_anvil.rope, q, offset=3, **options))
        yield for_matrix_units(partial(mlx_anvil.rope_qk, q, k, offset=3, **options))


def of_models() -> Iterator[Call]:
    dim = 128
    for dtype, traditional, freqs in product(MODEL_DTYPES, (False, True), (None, mx.ones((dim // 2,)))):
        options = {"dims": dim, "traditional": traditional, "freqs": freqs}
        # A prompt, a token, a batch of sequences that are not at the same position: one kernel for all.
        for length, offset in ((PROMPT, 0), (1, LONG_CACHE), (1, mx.array([LONG_CACHE]))):
            q, k = (projected_heads(dtype, count, length, dim) for count in (4, 2))
            yield partial(mlx_anvil.rope, q, offset=offset, **options)
            yield partial(mlx_anvil.rope_qk, q, k, offset=offset, **options)
            start = 0 if isinstance(offset, int) else mx.array([0])
            cache = mx.zeros((1, 2, PROMPT, dim), dtype)
            yield partial(mlx_anvil.rope_and_cache, q, k, k, cache, cache, offset=start, **options)

"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    FEW_TOKENS,
    LONG_CACHE,
    MODEL_DTYPES,
    SHORT_CACHE,
    Call,
    cached,
    for_matrix_units,
    projected_heads,
)

RANKS = (256, 257, 512)  # tiles are for ranks up to 256 and up to 512
KEYS = (40, 300)  # in one part and in several


def _call(dtype: mx.Dtype, rank: int, keys: int, heads: int = 2, queries: int = 1, **options: object) -> Call:
    q = [mx.zeros((1, heads, queries, dim), dtype) for dim in (rank, 64)]
    k = [mx.zeros((1, 1, keys, dim), dtype) for dim in (rank, 64)]
    return partial(mlx_anvil.mla_decode, *q, *k, scale=0.1, **options)


def every_kernel() -> Iterator[Call]:
    for dtype in DTYPES:
        for rank, keys in product(RANKS, KEYS):
            yield _call(dtype, rank, keys)
            yield for_matrix_units(_call(dtype, rank, keys))
        yield _call(dtype, 512, 300, heads=20, queries=2)
        sinks = mx.zeros((2,), dtype)
        for keys, softcap, given, return_lse in product(KEYS, (None, 5.0), (None, sinks), (False, True)):
            for mask in (None, "causal", mx.ones((1, keys), mx.bool_), mx.zeros((1, 1, 1, keys), dtype)):
                yield _call(dtype, 256, keys, mask=mask, softcap=softcap, sinks=given, return_lse=return_lse)
        yield from _by_group_products(dtype)


def _by_group_products(dtype: mx.Dtype) -> Iterator[Call]:
    """Products of four SIMD groups take more rows, and no mask array. Parts of keys need no other constants."""
    heads = 20
    sinks = mx.zeros((heads,), dtype)
    for keys, causal, softcap, given, return_lse in product(
        KEYS, (None, "causal"), (None, 5.0), (None, sinks), (False, True)
    ):
        call = _call(dtype, 512, keys, heads, mask=causal, softcap=softcap, sinks=given, return_lse=return_lse)
        yield for_matrix_units(call, group_products=True)


def of_models() -> Iterator[Call]:
    for dtype in MODEL_DTYPES:
        for keys in (SHORT_CACHE, LONG_CACHE):
            # DeepSeek-V2-Lite, GLM-4.7-Flash and DeepSeek-V3; several tokens in speculative decoding.
            for heads, queries, mask in ((16, 1, None), (20, 1, mx.bool_), (128, 1, None), (16, FEW_TOKENS, "causal")):
                q = [projected_heads(dtype, heads, queries, dim) for dim in (512, 64)]
                k = [cached(dtype, 1, keys, dim) for dim in (512, 64)]
                given = mx.zeros((1, 1, queries, keys), mask) if isinstance(mask, mx.Dtype) else mask
                yield partial(mlx_anvil.mla_decode, *q, *k, scale=0.1, mask=given)

"""rope, rope_qk and rope_and_cache: the definitions in MLX ops, and the entries in the registry."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64


def rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool = False,
    base: float = 10000.0,
    scale: float = 1.0,
    offset: int | mx.array = 0,
    freqs: mx.array | None = None,
) -> mx.array:
    """Rotates pairs of the first ``dims`` elements of ``x``, ``[batch, heads, length, head_dim]``.

    Pair ``i`` at position ``p`` turns by ``p * scale * base**(-2i / dims)``. The angles are computed in float64 and
    reduced to one turn, because MLX evaluates sines and cosines in float32, which has no digits left for distant
    positions.
    """
    pairs = dims // 2

    def number(value: float) -> mx.array:
        return mx.array(value, mx.float64)

    with mx.stream(mx.cpu):
        steps = mx.arange(x.shape[-2]).astype(mx.float64)
        offsets = mx.array(offset).astype(mx.float64).reshape(-1, 1, 1)
        exponents = mx.arange(pairs).astype(mx.float64) / number(-pairs)
        frequencies = mx.power(number(base), exponents) if freqs is None else 1 / freqs.astype(mx.float64)
        turns = (offsets + steps[:, None]) * (frequencies * number(scale / (2 * math.pi)))
        angles = mx.expand_dims(turns - mx.round(turns), 1) * number(2 * math.pi)
        cos, sin = (y.astype(x.dtype) for y in _float64.cos_sin(angles))
        rotated, rest = x[..., :dims], x[..., dims:]
        a, b = (rotated[..., 0::2], rotated[..., 1::2]) if traditional else mx.split(rotated, 2, axis=-1)
        both = [a * cos - b * sin, a * sin + b * cos]
        turned = mx.stack(both, axis=-1).flatten(-2) if traditional else mx.concatenate(both, axis=-1)
        return mx.concatenate([turned, rest], axis=-1)


def rope_and_cache(
    q: mx.array,
    k: mx.array | None,
    v: mx.array | None,
    k_cache: mx.array,
    v_cache: mx.array,
    dims: int,
    *,
    offset: int | mx.array = 0,
    **options: Any,
) -> tuple[mx.array, mx.array, mx.array]:
    """The rotated queries, and the caches with the rotated keys and the values from ``offset`` on; an array has one
    element. Positions outside the caches are not written."""
    if k is None or v is None:
        kv_heads = k_cache.shape[1]
        q, k, v = mx.split(q, [q.shape[1] - 2 * kv_heads, q.shape[1] - kv_heads], axis=1)
    first: Any = offset if isinstance(offset, int) else offset.item()
    begin, end = max(first, 0), max(min(first + q.shape[2], k_cache.shape[2]), 0)

    def updated(cache: mx.array, rows: mx.array) -> mx.array:
        written = rows[:, :, begin - first : max(end - first, 0)].astype(cache.dtype)
        return mx.concatenate([cache[:, :, :begin], written, cache[:, :, end:]], axis=2)

    rotated = (rope(x, dims, offset=first, **options) for x in (q, k))
    return next(rotated), updated(k_cache, next(rotated)), updated(v_cache, v)


# ---- a shape is (batch, heads, length, head_dim) ---------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    return [mx.random.normal(shape).astype(dtype)]


def _pair_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    return [*_inputs(shape, dtype), *_inputs(shape, dtype)]


def _of_share(function: Callable[..., mx.array], share: float, **options: Any) -> Callable[..., mx.array]:
    """The op as a function of ``x``, which rotates a fraction of its elements."""

    def of_arrays(x: mx.array, **more: Any) -> mx.array:
        return function(x, _dims(x, share), **options, **more)

    return of_arrays


def _dims(x: mx.array, share: float) -> int:
    return max(2, 2 * int(x.shape[-1] * share / 2)) if isinstance(x, mx.array) else 2


def _sum_of_both(q: mx.array, k: mx.array, **options: Any) -> mx.array:
    a, b = _ext.rope_qk(q, k, min(_dims(q, 1.0), _dims(k, 1.0)), **options)
    return a + b


def _sum_of_both_by_definition(q: mx.array, k: mx.array) -> mx.array:
    return rope(q, _dims(q, 1.0)) + rope(k, _dims(k, 1.0))


def _cache_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    return [y for _ in range(5) for y in _inputs(shape, dtype)]


def _packed_cache_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, heads, length, dim = shape
    return [*_inputs((batch, 3 * heads, length, dim), dtype), *_inputs(shape, dtype), *_inputs(shape, dtype)]


def _sum_of_all(function: Callable[..., tuple[mx.array, ...]], packed: bool) -> Callable[..., mx.array]:
    """The op as a function of arrays. A cache keeps its first row, and has none for the last token."""

    def of_arrays(*arrays: mx.array, **more: Any) -> mx.array:
        given: Any = (arrays[0], None, None, *arrays[1:]) if packed else arrays
        q, k, v, k_cache, v_cache = given
        dims = min(_dims(x, 1.0) for x in (arrays[0], k_cache))
        offset = mx.array(int(isinstance(q, mx.array) and q.ndim == 4 and q.shape[2] > 1))
        results = function(q, k, v, k_cache, v_cache, dims, offset=offset, **more)
        return results[0] + results[1] + results[2]

    return of_arrays


def _cache_spec(variant: str, packed: bool) -> OpSpec:
    operands = ("q", "k_cache", "v_cache") if packed else ("q", "k", "v", "k_cache", "v_cache")
    return OpSpec(
        name="rope_and_cache",
        variant=variant,
        function=_sum_of_all(_ext.rope_and_cache, packed),
        reference=_sum_of_all(rope_and_cache, packed),
        make_inputs=_packed_cache_inputs if packed else _cache_inputs,
        arguments=operands,
        operands=operands,
        contract_shapes=_SHAPES,
        check_shapes=((2, 3, 37, 80), (1, 8, 1, 128)),
        special_values=_SPECIAL_VALUES,
    )


def _spec(variant: str, share: float, **options: Any) -> OpSpec:
    return OpSpec(
        name="rope",
        variant=variant,
        function=_of_share(_ext.rope, share, **options),
        reference=_of_share(rope, share, **options),
        make_inputs=_inputs,
        arguments=("x",),
        operands=("x",),
        contract_shapes=_SHAPES,
        check_shapes=((2, 3, 37, 80), (1, 32, 512, 128)),
        special_values=_SPECIAL_VALUES,
    )


# No infinities: rounding of a cosine decides if the definition subtracts two infinities.
_SPECIAL_VALUES = (math.nan, 1e4, -1e4, 0.0, -0.0)
_SHAPES = (
    (1, 1, 1, 2),
    (0, 2, 3, 8),
    (2, 2, 0, 8),
    (1, 3, 1, 64),
    (2, 3, 5, 7),
    (1, 2, 33, 72),
    (2, 5, 3, 67),
    (1, 2, 3, 66),
    (3, 2, 7, 26),
    (2, 3, 11, 26),
)

SPECS = (
    _spec("halves", 1.0, offset=10**6),
    _spec("traditional", 0.75, traditional=True, base=500.0, scale=0.25, offset=3),
    OpSpec(
        name="rope_qk",
        variant="",
        function=_sum_of_both,
        reference=_sum_of_both_by_definition,
        make_inputs=_pair_inputs,
        arguments=("q", "k"),
        operands=("q", "k"),
        contract_shapes=_SHAPES,
        check_shapes=((1, 32, 1, 128), (1, 32, 512, 128)),
        special_values=_SPECIAL_VALUES,
    ),
    _cache_spec("", packed=False),
    _cache_spec("packed", packed=True),
)

"""kv_append: the definition in MLX ops, and the entries in the registry."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference._quantized_kv import DEFAULTS, KeysOrValues
from mlx_anvil.reference.rope import rope as rotated


def kv_append(
    cache_k: KeysOrValues,
    cache_v: KeysOrValues,
    k: mx.array,
    v: mx.array,
    *,
    offset: int | mx.array | None = None,
    slots: mx.array | None = None,
    rope: dict[str, Any] | None = None,
    kv_group_size: int | None = None,
    kv_bits: int | tuple[int, int] | None = None,
    kv_mode: str = "affine",
) -> tuple[Any, Any]:
    """The caches after each token's row of ``k``, rotated, and of ``v`` replaced one row. The last of several tokens
    with one row counts; rows that the caches lack do not."""
    batch, _, length, _ = k.shape
    first = cache_k if isinstance(cache_k, mx.array) else cache_k[0]
    rows = _numbers(offset if slots is None else slots, batch, length, counted=slots is None)
    if rope is not None and k.size > 0:
        options = dict(rope)
        given = options.pop("offset", None)
        positions = rows if given is None else _numbers(given, batch, length, counted=_is_counted(given, batch))
        k = mx.concatenate(
            [
                mx.concatenate([rotated(k[b : b + 1, :, t : t + 1], offset=p, **options) for t, p in enumerate(own)], 2)
                for b, own in enumerate(positions)
            ],
            axis=0,
        )
    tokens = _tokens_of_rows(rows, first.shape[0] // max(batch, 1) * first.shape[2])
    pair = kv_bits if isinstance(kv_bits, tuple | list) else (kv_bits, kv_bits)
    results: list[Any] = []
    for cache, x, bits in ((cache_k, k, pair[0]), (cache_v, v, pair[1])):
        if isinstance(cache, mx.array):
            results.append(_written(cache, x.astype(cache.dtype), tokens))
            continue
        group_size, default = DEFAULTS[kv_mode]
        parts = mx.quantize(x, kv_group_size or group_size, bits or default, mode=kv_mode)
        results.append(tuple(_written(c, part, tokens) for c, part in zip(cache, parts, strict=True)))
    return results[0], results[1]


def _is_counted(offset: Any, batch: int) -> bool:
    return isinstance(offset, int) or offset.size == 1 or (offset.ndim == 1 and batch > 1)


def _numbers(given: Any, batch: int, length: int, counted: bool) -> list[list[int]]:
    """A number per token: those that are given, or counted from one that is."""
    if not counted:
        return given.reshape(batch, length).tolist()  # type: ignore[no-any-return]
    starts = [given] if isinstance(given, int) else given.reshape(-1).tolist()
    return [[start + t for t in range(length)] for start in (starts * batch)[:batch]]


def _tokens_of_rows(rows: list[list[int]], count: int) -> list[list[int]]:
    """The token that each row of the caches gets, or -1."""
    tokens = [[-1] * count for _ in rows]
    for own, of_batch in zip(tokens, rows, strict=True):
        for token, row in enumerate(of_batch):
            if 0 <= row < count:
                own[row] = token
    return tokens


def _written(cache: mx.array, x: mx.array, tokens: list[list[int]]) -> mx.array:
    if x.size == 0 or cache.size == 0:
        return cache
    batch, heads, _, columns = x.shape
    pages, page_size = cache.shape[0] // batch, cache.shape[2]
    chosen = mx.array(tokens, mx.int32)[:, None, :, None]
    old = cache.reshape(batch, pages, heads, page_size, columns).swapaxes(1, 2).reshape(batch, heads, -1, columns)
    new = mx.where(chosen >= 0, mx.take_along_axis(x, mx.maximum(chosen, 0), axis=2), old)
    return new.reshape(batch, heads, pages, page_size, columns).swapaxes(1, 2).reshape(cache.shape)


# ---- a shape is (batch, heads, length, head_dim) ---------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, heads, length, dim = shape
    shapes = ((batch, heads, length + 2, dim),) * 2 + (shape,) * 2
    return [mx.random.normal(own).astype(dtype) for own in shapes]


def _sum_of_both(function: Callable[..., tuple[Any, Any]]) -> Callable[..., mx.array]:
    """The op as a function of arrays. A cache keeps its first and its last row."""

    def of_arrays(cache_k: mx.array, cache_v: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
        dims = max(2, 2 * (k.shape[-1] // 2)) if isinstance(k, mx.array) and k.ndim > 0 else 2
        a, b = function(cache_k, cache_v, k, v, offset=1, rope={"dims": dims}, **more)
        return a + b  # type: ignore[no-any-return]

    return of_arrays


_OPERANDS = ("cache_k", "cache_v", "k", "v")

SPECS = (
    OpSpec(
        name="kv_append",
        variant="",
        function=_sum_of_both(_ext.kv_append),
        reference=_sum_of_both(kv_append),
        make_inputs=_inputs,
        arguments=_OPERANDS,
        operands=_OPERANDS,
        contract_shapes=(
            (1, 1, 1, 2),
            (0, 2, 3, 8),
            (2, 2, 0, 8),
            (1, 3, 1, 64),
            (2, 3, 5, 7),
            (1, 2, 33, 72),
            (3, 2, 7, 26),
            (2, 3, 11, 26),
        ),
        check_shapes=((2, 3, 37, 80), (1, 8, 128, 128)),
        # No infinities: rounding of a cosine decides if the definition subtracts two infinities.
        special_values=(math.nan, 1e4, -1e4, 0.0, -0.0),
    ),
)

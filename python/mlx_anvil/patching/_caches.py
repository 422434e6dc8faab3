"""Attention with mlx-lm's ``KVCache``: RoPE and both writes to the cache in one call of ``rope_and_cache``.

Applies to the methods that have one of the forms in :mod:`~mlx_anvil.patching._cache_forms`, and calls in which the
cache has room for the tokens. All other calls run the method as before.
"""

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil import _ext
from mlx_anvil.patching import _cache_forms as forms
from mlx_anvil.patching._code import names_of_form
from mlx_anvil.patching._rebind import Function
from mlx_anvil.patching._routes import unrouted

_ROPE = nn.RoPE.__call__  # as it is on import, before another package replaces it
_ATTENTION = "scaled_dot_product_attention"


def with_cache_writes(method: FunctionType, ours: FunctionType) -> Function:
    """Returns ``ours``, the copy of ``method`` that calls our ops, or a function that also writes to caches."""
    has_norms = names_of_form(method, forms.attention_with_norms) is not None
    if not has_norms and names_of_form(method, forms.attention) is None:
        return ours
    is_cache = _is_standard_cache()

    @functools.wraps(method)
    def call(self: nn.Module, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not is_cache(cache) or cache.keys is None or cache.offset + x.shape[1] > cache.keys.shape[2]:
            return ours(self, x, mask, cache)  # type: ignore[no-any-return]
        rotation = _rotation(self.rope)
        if rotation is None:
            return ours(self, x, mask, cache)  # type: ignore[no-any-return]
        batch, length, _ = x.shape
        queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if has_norms:
            queries = self.q_norm(queries.reshape(batch, length, self.n_heads, -1))
            keys = self.k_norm(keys.reshape(batch, length, self.n_kv_heads, -1))
        is_token = length == 1
        written = _written_token(cache, queries, keys, values, self.n_heads, rotation) if is_token else None
        if written is None:
            rows = (
                y.reshape(batch, length, count, -1).transpose(0, 2, 1, 3)
                for y, count in ((queries, self.n_heads), (keys, self.n_kv_heads), (values, self.n_kv_heads))
            )
            written = _written(cache, list(rows), self.rope, rotation)
        queries, keys, values = written
        attention = ours.__globals__[_ATTENTION]
        output = attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        output = output if is_token else output.transpose(0, 2, 1, 3)
        result: mx.array = self.o_proj(output.reshape(batch, length, -1))
        return result

    return call


def _written_token(
    cache: Any, queries: mx.array, keys: mx.array, values: mx.array, heads: int, rotation: dict[str, Any]
) -> tuple[mx.array, ...] | None:
    """What ``_written`` returns, of one token and in one node; None if that does not fit."""
    try:
        result = _ext._rope_and_cache_of_token(
            queries, keys, values, cache.keys, cache.values, heads, offset=cache.offset, **rotation
        )
    except (TypeError, ValueError):
        return None
    if result is None:
        return None
    queries, cache.keys, cache.values, *rows = result  # the only references to the caches: they are written in place
    cache.offset += 1
    return (queries, *rows)


def _written(cache: Any, heads: list[mx.array], rope: nn.Module, rotation: dict[str, Any]) -> tuple[mx.array, ...]:
    """The rotated queries, and the keys and values in the cache up to the last token."""
    queries, keys, values = heads
    offset = cache.offset
    before = _ext._fallback_count()
    try:
        result = _ext.rope_and_cache(queries, keys, values, cache.keys, cache.values, offset=offset, **rotation)
    except (TypeError, ValueError):
        result = None
    if result is None or _ext._fallback_count() != before:
        queries, keys = rope(queries, offset=offset), rope(keys, offset=offset)
        return (queries, *cache.update_and_fetch(keys, values))
    queries, cache.keys, cache.values = result  # the only references to the caches: they are written in place
    cache.offset = offset + keys.shape[2]
    return (queries, *cache.keys_and_values())


def _is_standard_cache() -> Callable[[Any], bool]:
    """Tells if an object is a ``KVCache`` of mlx-lm with the known methods."""
    module = sys.modules.get("mlx_lm.models.cache")
    cls: Any = getattr(module, "KVCache", None)
    update, fetch = (vars(cls).get(name) for name in ("update_and_fetch", "keys_and_values")) if cls else (None, None)
    if not (
        isinstance(update, FunctionType)
        and isinstance(fetch, FunctionType)
        and names_of_form(update, forms.update_and_fetch)
        and names_of_form(fetch, forms.keys_and_values)
    ):
        return lambda cache: False

    def ask(cache: Any) -> bool:
        return type(cache) is cls and cls.update_and_fetch is update and cls.keys_and_values is fetch

    return ask


def _rotation(rope: Any) -> dict[str, Any] | None:
    """The arguments of ``rope_and_cache`` that the module stands for; None for a module that is not known."""
    method = type(rope).__call__
    original = unrouted(method) if isinstance(method, FunctionType) else None
    if original is _ROPE:
        return {"dims": rope.dims, "traditional": rope.traditional, "base": rope.base, "scale": rope.scale}
    if original is not None and _has_frequencies(original):
        return {"dims": rope.dims, "traditional": rope.traditional, "base": None, "freqs": rope._freqs}
    return None


@functools.lru_cache(maxsize=64)
def _has_frequencies(method: FunctionType) -> bool:
    return names_of_form(method, forms.rope_of_frequencies) is not None

"""Masks that mlx-lm makes as arrays, and that flash_attention takes as arguments: causal ones with a window, or over
batches that are padded on the left.

A patched model makes the same arrays, as :class:`CausalMask`, which also knows what is in it. Attention takes that, and
nothing reads the array, so that MLX never computes it. Everything else that a model does with the array still works.
"""

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._plan import attention_plan
from mlx_anvil.patching import _mask_forms as forms
from mlx_anvil.patching._code import names_of_form
from mlx_anvil.patching._described import Described
from mlx_anvil.patching._namespace import Current, live
from mlx_anvil.patching._rebind import Call, Function, Rebinder, StandIn

MASK = Call("attention", "create_attention_mask", "")  # without an op: not in the report
_ARRAY = Call("attention", "create_causal_mask", "")


class CausalMask(Described):
    """A mask ``[..., queries, keys]`` whose last query is at the last key, and what it says."""

    window: int | None
    starts: mx.array | None  # [batch]: the keys before these are padding
    _plan: _ext.AttentionPlan | None

    @staticmethod
    def of(mask: mx.array, window: int | None, starts: mx.array | None) -> "CausalMask":
        result = CausalMask(mask)
        result.window = window
        # Caches change the array in place at their next step. They go below 0 where a window has moved on.
        result.starts = None if starts is None else mx.clip(starts, 0, mask.shape[-1])
        result._plan = None
        return result

    def options(self, queries: mx.array, keys: Any) -> dict[str, Any]:
        """The arguments of flash_attention that say the same; the array itself if it was changed, or for a call of
        other lengths."""
        kv_len = (keys[0] if isinstance(keys, tuple | list) else keys).shape[2]
        fits = self.shape[-2:] == (queries.shape[2], kv_len) and (self.ndim == 2 or self.shape[0] == queries.shape[0])
        if self.was_changed or not fits:
            return {"mask": self}
        options = {"mask": "causal", "window_size": self.window}
        if self.starts is None:
            return options
        if self._plan is None:  # one for all layers
            self._plan = attention_plan(q_len=queries.shape[2], kv_len=kv_len, starts=self.starts)
        return options | {"plan": self._plan}


def takes_masks(attention: Function) -> Function:
    """Attention that does not read the array of a :class:`CausalMask`."""

    @functools.wraps(attention)
    def call(queries: mx.array, keys: Any, values: Any, *, mask: Any = None, **options: Any) -> Any:
        of_mask = mask.options(queries, keys) if type(mask) is CausalMask else {"mask": mask}
        return attention(queries, keys, values, **of_mask, **options)

    return call


def mask_stand_in(base: Any) -> StandIn:
    """That of ``create_attention_mask`` in ``mlx_lm.models.base``, which asks the cache for the mask."""

    def make_array(current: Current) -> Function:
        return live(current, base.create_causal_mask, _causal_mask_of(base.create_causal_mask))

    rebinder = Rebinder({_ARRAY: StandIn(base.create_causal_mask, make_array)})
    original = base.create_attention_mask
    ours = rebinder.rebound(original)

    @functools.wraps(original)
    def create_attention_mask(h: mx.array, cache: Any = None, *args: Any, **kwargs: Any) -> Any:
        return ours(h, _Asked(cache, rebinder) if cache else cache, *args, **kwargs)

    return StandIn(original, lambda current: live(current, original, create_attention_mask))


def _causal_mask_of(original: Function) -> Function:
    @functools.wraps(original)
    def create_causal_mask(
        N: int,
        offset: int = 0,
        window_size: int | None = None,
        right_padding: mx.array | None = None,
        left_padding: mx.array | None = None,
    ) -> mx.array:
        mask: mx.array = original(N, offset, window_size, right_padding, left_padding)
        return mask if right_padding is not None else CausalMask.of(mask, window_size, left_padding)

    return create_causal_mask


class _Asked:
    """A cache that is asked for its mask: its method runs with our ``create_causal_mask``."""

    def __init__(self, cache: Any, rebinder: Rebinder) -> None:
        self._cache = cache
        if hasattr(cache, "make_mask"):
            self.make_mask = _method(cache.make_mask, rebinder)


def _method(method: Any, rebinder: Rebinder) -> Callable[..., Any]:
    function = getattr(method, "__func__", None)
    if not isinstance(function, FunctionType):
        return method  # type: ignore[no-any-return]
    if _is_of_batch_rotating(function):
        return functools.partial(_batch_rotating_mask, method)
    return MethodType(rebinder.rebound(function), method.__self__) if rebinder.reach(function).calls else method


@functools.lru_cache(maxsize=64)
def _is_of_batch_rotating(function: FunctionType) -> bool:
    return names_of_form(function, forms.batch_rotating_mask) is not None


def _batch_rotating_mask(method: Any, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
    """The mask of a ``BatchRotatingKVCache``, which does not call ``create_causal_mask``."""
    cache, mask = method.__self__, method(N, window_size=window_size, return_array=return_array)
    if N == 1 and (cache.rotated or cache._idx >= cache.max_size):
        return mask  # type: ignore[no-any-return]  # one row, in the order in which the cache goes around
    trimmed = max(0, cache._idx - cache.max_size + int(N > 1))
    return CausalMask.of(mask, window_size or cache.max_size, cache.left_padding - trimmed)

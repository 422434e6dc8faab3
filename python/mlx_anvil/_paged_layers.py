"""What the layers of a model get from a :class:`~mlx_anvil.lm.PagedCache`, in the interface of mlx-lm's caches."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._plan import attention_plan
from mlx_anvil.patching._stand_ins import Pages

if TYPE_CHECKING:
    from mlx_anvil._paged_cache import PagedCache, Sequence

NAME = "[PagedCache]"
Parts = mx.array | tuple[mx.array, ...]  # pages of keys or values: an array, or codes, scales and biases


@dataclass
class LayerPages:
    """The pages of one layer, and its window."""

    window: int | None
    keys: Parts | None = None
    values: Parts | None = None

    def parts(self) -> list[mx.array]:
        return [part for x in (self.keys, self.values) if x is not None for part in as_tuple(x)]


@dataclass(frozen=True)
class Step:
    """What the layers of one call share."""

    new_tokens: list[int]
    offset: Any  # tokens before the call: an int for one sequence, otherwise an array
    end: Any  # tokens after it
    slots: mx.array  # where the tokens are written, [1, batch * tokens]; -1: padding
    columns: int  # of the table of pages
    plan: _ext.AttentionPlan

    @staticmethod
    def of(sequences: SequenceOf["Sequence"], counts: list[int], page_size: int) -> "Step":
        """Of sequences that have their pages, but are not longer yet."""
        most = max(counts)
        slots = []
        for sequence, count in zip(sequences, counts, strict=True):
            positions = range(len(sequence), len(sequence) + count)
            slots += [sequence._pages[p // page_size] * page_size + p % page_size for p in positions]
            slots += [-1] * (most - count)
        columns = max(len(sequence._pages) for sequence in sequences)
        table = [sequence._pages + [-1] * (columns - len(sequence._pages)) for sequence in sequences]
        offsets = [len(sequence) for sequence in sequences]
        ends = [offset + count for offset, count in zip(offsets, counts, strict=True)]
        lengths = mx.array(ends)
        is_one = len(sequences) == 1
        return Step(
            new_tokens=counts,
            offset=offsets[0] if is_one else mx.array(offsets),
            end=ends[0] if is_one else lengths,
            slots=mx.array([slots]),
            columns=columns,
            plan=attention_plan(
                q_len=most,
                lengths=lengths,
                q_lengths=mx.array(counts) if min(counts) < most else None,
                block_table=mx.array(table),
                page_size=page_size,
            ),
        )

    def mask(self, tokens: int, window: int | None, page_size: int) -> mx.array:
        """The causal mask as an array, ``[batch, 1, tokens, pages * page_size]``."""
        queries = mx.reshape(mx.array(self.offset), (-1, 1, 1, 1)) + mx.arange(tokens)[:, None]
        keys = mx.arange(self.columns * page_size)
        visible = queries >= keys
        return visible if window is None else visible & (queries < keys + window)


class LayerCache:
    """What one layer of a model gets as its cache in one call (:meth:`PagedCache.step`)."""

    def __init__(self, cache: "PagedCache", layer: LayerPages, step: Step) -> None:
        self._cache, self._layer, self._step = cache, layer, step
        self._is_written = False

    @property
    def offset(self) -> Any:
        """The number of tokens before the call, and once it has been written, after it."""
        return self._step.end if self._is_written else self._step.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The causal mask of a call with ``N`` tokens of each sequence, as mlx-lm's caches make it."""
        window = window_size if window_size is not None else self._layer.window
        if return_array:
            return self._step.mask(N, window, self._cache.page_size)
        return None if N == 1 and window is None else Causal.of(window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Pages, Parts]:
        """Writes the keys and values of the new tokens; returns the pages for the patched model's attention."""
        step, layer = self._step, self._layer
        batch, _, tokens, _ = keys.shape
        if (batch, tokens) != (len(step.new_tokens), max(step.new_tokens)):
            raise ValueError(
                f"{NAME} the model was called with {tokens} tokens of {batch} sequences; allowed: those of step(), "
                f"{max(step.new_tokens)} of {len(step.new_tokens)}."
            )
        if self._is_written:
            raise ValueError(f"{NAME} the layer was written twice; allowed: one call of the model for each step().")
        if layer.keys is None or layer.values is None:
            layer.keys, layer.values = self._cache_of(keys, 0), self._cache_of(values, 1)
        options = self._cache._options
        new = [x if batch == 1 else x.swapaxes(0, 1).flatten(1, 2)[None] for x in (keys, values)]
        layer.keys, layer.values = _ext.kv_append(layer.keys, layer.values, *new, slots=step.slots, **options)
        self._is_written = True
        return Pages(layer.keys, {"plan": step.plan} | options), layer.values

    def _cache_of(self, x: mx.array, side: int) -> Parts:
        """Empty pages for keys (side 0) or values (1) like ``x``."""
        shape = (self._cache._page_count, x.shape[1], self._cache.page_size)
        bits = self._cache._options.get("kv_bits")
        if bits is None:
            return mx.zeros((*shape, x.shape[3]), x.dtype)
        bits = bits if isinstance(bits, int) else bits[side]
        group = self._cache._options["kv_group_size"]
        if x.shape[3] % group:
            raise ValueError(
                f"{NAME} the model's head dim is {x.shape[3]}; allowed: a multiple of kv_group_size, {group}."
            )
        numbers = [mx.zeros((*shape, x.shape[3] // group), x.dtype) for _ in range(2)]
        return (mx.zeros((*shape, x.shape[3] * bits // 32), mx.uint32), *numbers)


class Causal(str):
    """mlx-lm's ``"causal"``, with the window of the layer."""

    window: int | None

    @staticmethod
    def of(window: int | None) -> "Causal":
        mask = Causal("causal")
        mask.window = window
        return mask


def as_tuple(parts: Parts) -> tuple[mx.array, ...]:
    return parts if isinstance(parts, tuple) else (parts,)

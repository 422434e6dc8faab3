"""What a :class:`~mlx_anvil.distributed.ShardedKVCache` gives to a patched model's attention as keys and values."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._paged_layers import Causal
from mlx_anvil.distributed._decode import gather_and_merge, own_sinks, visible
from mlx_anvil.distributed._layout import Layout
from mlx_anvil.distributed._merge import merge_attention
from mlx_anvil.distributed._order import ORDER
from mlx_anvil.distributed._ring_attention import ring_attention
from mlx_anvil.patching._described import Described
from mlx_anvil.patching._stand_ins import CacheKeys

NAME = "[ShardedKVCache]"
Partial = tuple[mx.array, mx.array]  # an output and its log-sum-exp


class MaskArray(Described):
    """The causal mask of a cache as an array, which nothing has to compute."""

    window: int | None

    @staticmethod
    def of(mask: mx.array, window: int | None) -> "MaskArray":
        result = MaskArray(mask)
        result.window = window
        return result


@dataclass(frozen=True)
class ShardedKeys(CacheKeys):
    """The keys of one layer and one call of the model.

    Attributes:
        group: of the ranks.
        layout: of the cache, with the new tokens.
        offset: the position of the first new token.
        keys: the rank's own ones that a query may see, in the order of their positions.
        values: likewise.
    """

    group: mx.distributed.Group
    layout: Layout
    offset: int
    keys: mx.array
    values: mx.array

    def attend(self, queries: mx.array, values: Any, *, mask: Any = None, **options: Any) -> mx.array:
        window = narrower(self.layout.window, _window_of(mask))
        options = {"softcap": None, **options}
        sinks = options.pop("sinks", None)
        if self.group.size() == 1:
            return self.attention(queries, window, sinks, options)
        (queries,) = ORDER.after_last(queries)
        out = self.attention(queries, window, sinks, options)
        ORDER.set_last(out)
        return out

    def attention(
        self, queries: mx.array, window: int | None, sinks: mx.array | None, options: dict[str, Any]
    ) -> mx.array:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{NAME} a layer reads .{name} of its keys or values, which are on several ranks; allowed: layers that only "
            "pass them to mlx-lm's scaled_dot_product_attention, and Gemma 2's, after mlx_anvil.patch(model)."
        )


@dataclass(frozen=True)
class CommonTokens(ShardedKeys):
    """Of tokens that every rank computes. ``keys`` include those of them that this rank keeps.

    Attributes:
        begin: the first new token that this rank keeps.
        end: the one after the last.
    """

    begin: int
    end: int

    def attention(
        self, queries: mx.array, window: int | None, sinks: mx.array | None, options: dict[str, Any]
    ) -> mx.array:
        options = {**options, "sinks": own_sinks(sinks, self.group)}
        if window is not None:
            partial = self._in_window(queries, window, options)
        elif self.end == self.begin:
            partial = self._part(queries, None, options)
        else:
            # A query before the rank's own new tokens sees none of them, one after them sees all.
            old = self.keys.shape[2] - (self.end - self.begin)
            parts = [
                self._part(queries[:, :, : self.begin], None, options, old),
                self._part(queries[:, :, self.begin : self.end], "causal", options),
                self._part(queries[:, :, self.end :], None, options),
            ]
            parts = [part for part in parts if part[0].shape[2] > 0]
            partial = _along_queries(parts)
        return gather_and_merge(*partial, self.group)[0]

    def _part(self, queries: mx.array, mask: Any, options: dict[str, Any], count: int | None = None) -> Partial:
        keys, values = (x if count is None else x[:, :, :count] for x in (self.keys, self.values))
        return _ext.flash_attention(queries, keys, values, mask=mask, return_lse=True, **options)

    def _in_window(self, queries: mx.array, window: int, options: dict[str, Any]) -> Partial:
        first = self.layout.first_visible(self.offset, window)
        end, length = self.layout.length, queries.shape[2]
        keys, values = last(self.keys, self.values, self.layout.counts(first, end)[self.group.rank()])
        mask = None
        if length > 1:
            positions = mx.array(self.layout.positions(self.group.rank(), first, end), mx.int32)
            mask = visible(positions, self.offset, length, window)
        return _ext.flash_attention(queries, keys, values, mask=mask, return_lse=True, **options)


@dataclass(frozen=True)
class SplitTokens(ShardedKeys):
    """Of tokens that are split over the ranks. ``keys`` are those of earlier tokens.

    Attributes:
        new_keys: of the rank's own part; all parts have one length, and the last ones end with padding.
        new_values: likewise.
    """

    new_keys: mx.array
    new_values: mx.array

    def attention(
        self, queries: mx.array, window: int | None, sinks: mx.array | None, options: dict[str, Any]
    ) -> mx.array:
        first = self.layout.first_visible(self.offset, window)
        counts = self.layout.counts(first, self.offset)
        keys, values, before = self.new_keys, self.new_values, None
        if any(counts):
            before = self._earlier(queries, counts[self.group.rank()], first, window, options)
            keys, values = mx.depends([keys, values], list(before))
        # Padding at the end needs no lengths, because no query before it sees it.
        options = {**options, "mask": "causal", "window_size": window, "sinks": sinks, "return_lse": True}
        out, lse = ring_attention(queries, keys, values, group=self.group, **options)
        return out if before is None else merge_attention([before[0], out], [before[1], lse])

    def _earlier(
        self, queries: mx.array, count: int, first: int, window: int | None, options: dict[str, Any]
    ) -> Partial:
        """Attention of all parts' queries to the earlier tokens. Queries travel, because a cache is longer than they
        are."""
        rank, ranks, length = self.group.rank(), self.group.size(), queries.shape[2]
        keys, values = last(self.keys, self.values, count)
        everyone = _gathered(queries, self.group)
        mask = None
        if window is not None:
            positions = mx.array(self.layout.positions(rank, first, self.offset), mx.int32)
            mask = visible(positions, self.offset, length * ranks, window)
        out, lse = _ext.flash_attention(everyone, keys, values, mask=mask, return_lse=True, **options)
        if ranks == 1:
            return out, lse
        lses = mx.distributed.all_gather(lse[None], group=self.group)
        total = mx.logsumexp(mx.maximum(lses, mx.finfo(mx.float32).min), axis=0)
        share = mx.exp(lse - total)[..., None]  # 0 where the rank has no visible key, as the output is
        summed = mx.distributed.all_sum(share * out.astype(mx.float32), group=self.group)
        own = slice(rank * length, (rank + 1) * length)
        return summed[:, :, own].astype(out.dtype), total[:, :, own]


def last(keys: mx.array, values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The last keys and values."""
    begin = keys.shape[2] - count
    return keys[:, :, begin:], values[:, :, begin:]


def narrower(first: int | None, second: int | None) -> int | None:
    """The smaller of two windows, of which None is the widest."""
    windows = [window for window in (first, second) if window is not None]
    return min(windows, default=None)


def _gathered(x: mx.array, group: mx.distributed.Group) -> mx.array:
    """The parts ``[B, H, L, D]`` of all ranks, one behind the other: ``[B, H, ranks * L, D]``."""
    parts = mx.distributed.all_gather(x[None], group=group)
    return parts.transpose(1, 2, 0, 3, 4).flatten(2, 3)


def _along_queries(parts: list[Partial]) -> Partial:
    if len(parts) == 1:
        return parts[0]
    return mx.concatenate([out for out, _ in parts], axis=2), mx.concatenate([lse for _, lse in parts], axis=2)


def _window_of(mask: Any) -> int | None:
    if mask is None or isinstance(mask, Causal) or (isinstance(mask, MaskArray) and not mask.was_changed):
        return getattr(mask, "window", None)
    if isinstance(mask, str) and mask == "causal":
        return None
    raise ValueError(
        f"{NAME} a layer has a mask of type {type(mask).__name__} that the cache did not make; allowed: that of "
        "mlx-lm's create_attention_mask, unchanged."
    )

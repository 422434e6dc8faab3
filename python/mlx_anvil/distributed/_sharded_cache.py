"""A KV cache for the models of mlx-lm whose tokens are split over the ranks of a group."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil._paged_cache import check_patched, windows_of
from mlx_anvil._paged_layers import Causal
from mlx_anvil.distributed._decode import visible
from mlx_anvil.distributed._layout import Layout
from mlx_anvil.distributed._sharded_keys import NAME, CommonTokens, MaskArray, ShardedKeys, SplitTokens, narrower


class ShardedKVCache:
    """The keys and values of one layer, of which every rank of a group holds about as many as the others.

    It takes the place of mlx-lm's ``KVCache`` and ``RotatingKVCache`` in a patched model. All ranks call the model with
    the same tokens, and get the same results. Each rank stores some of the new tokens and attends to those it has; one
    ``all_gather`` per layer merges the partial results (:func:`mlx_anvil.distributed.merge_attention`).
    :func:`mlx_anvil.distributed.prefill` splits the computation of a prompt, too.

    All ranks have to make the same calls, in the same order, and to evaluate their results: a rank that does not leaves
    the others waiting.

    Args:
        group (mx.distributed.Group, optional): Default: ``mx.distributed.init()``.
        window_size (int, optional): how many tokens a query sees, its own included. Older ones are dropped. Default:
            all.

    Raises:
        ValueError: ``window_size`` is less than 1.
    """

    step = 256  # keys by which memory grows, as in mlx-lm

    def __init__(self, group: mx.distributed.Group | None = None, *, window_size: int | None = None) -> None:
        if window_size is not None and (type(window_size) is not int or window_size < 1):
            raise ValueError(f"{NAME} window_size is {window_size!r}; allowed: an int of at least 1, or None.")
        self.group = group or mx.distributed.init()
        self.keys: mx.array | None = None  # [B, heads, room, head_dim]
        self.values: mx.array | None = None
        self._layout = Layout(self.group.size(), window_size)
        self._held = 0  # own tokens in memory; the last of them are those that a window still shows
        self._newest: mx.array | None = None  # keys of the last call, which depend on all communication before them
        self._part: int | None = None  # tokens of the next call, if they are split over the ranks

    # ---- what models read and call -----------------------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """The position of the next token; before a call whose tokens are split, of the first one of this rank."""
        if self._part is None:
            return self._layout.length
        return self._layout.length + self.group.rank() * self._layout.part_size(self._part)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The causal mask of a call with ``N`` tokens, as mlx-lm's caches make it."""
        window = narrower(self._layout.window, window_size)
        if return_array:
            return MaskArray.of(visible(mx.arange(self.offset + N), self.offset, N, window), window)
        return None if N == 1 and window is None else Causal.of(window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[ShardedKeys, ShardedKeys]:
        """Stores what this rank keeps of the new tokens; returns what the patched model's attention takes."""
        if self.keys is not None and keys.shape[0] != self.keys.shape[0]:
            raise ValueError(
                f"{NAME} the model was called with a batch of {keys.shape[0]}; allowed: {self.keys.shape[0]}, as before."
            )
        self._newest = keys
        fetched = self._fetch_common(keys, values) if self._part is None else self._fetch_split(keys, values)
        return fetched, fetched

    def _fetch_common(self, keys: mx.array, values: mx.array) -> ShardedKeys:
        rank, offset = self.group.rank(), self._layout.length
        before = self._layout.counts(self._layout.first_visible(offset))[rank]
        begins, ends = self._layout.place(keys.shape[2])
        begin, end = begins[rank], ends[rank]
        self._write(keys[:, :, begin:end], values[:, :, begin:end], before)
        own_keys, own_values = self._own(keys, values, before + end - begin)
        return CommonTokens(self.group, self._layout, offset, own_keys, own_values, begin, end)

    def _fetch_split(self, keys: mx.array, values: mx.array) -> ShardedKeys:
        assert self._part is not None
        count, self._part = self._part, None
        rank, offset, part = self.group.rank(), self._layout.length, self._layout.part_size(count)
        if keys.shape[2] != part:
            raise ValueError(
                f"{NAME} the model was called with {keys.shape[2]} tokens; allowed: {part}, a rank's part."
            )
        before = self._layout.counts(self._layout.first_visible(offset))[rank]
        own = self._layout.split(count)[rank]
        self._write(keys[:, :, :own], values[:, :, :own], before)
        old_keys, old_values = (x[:, :, :before] for x in self._own(keys, values, before + own))
        return SplitTokens(self.group, self._layout, offset, old_keys, old_values, keys, values)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _own(self, keys: mx.array, values: mx.array, count: int) -> tuple[mx.array, mx.array]:
        """The last of the rank's own tokens. Without any, empty arrays like the new ones."""
        if self.keys is None or self.values is None:
            return keys[:, :, :0], values[:, :, :0]
        begin, end = self._held - count, self._held
        return self.keys[:, :, begin:end], self.values[:, :, begin:end]

    def _write(self, keys: mx.array, values: mx.array, used: int) -> None:
        """Appends tokens to the rank's own, of which the last ``used`` are still visible."""
        count = keys.shape[2]
        if count == 0:
            return
        if self.keys is None or self.values is None or self._held + count > self.keys.shape[2]:
            rooms = []
            for new, old in ((keys, self.keys), (values, self.values)):
                kept = [] if old is None else [old[:, :, self._held - used : self._held]]
                room = -(-(used + count) // self.step) * self.step - (used if kept else 0)
                rooms.append(mx.concatenate([*kept, mx.zeros((*new.shape[:2], room, new.shape[3]), new.dtype)], axis=2))
            self._held = used
            self.keys, self.values = rooms
        end = self._held + count
        self.keys[:, :, self._held : end] = keys
        self.values[:, :, self._held : end] = values
        self._held = end

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's memory."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    # ---- the rest of mlx-lm's interface ------------------------------------------------------------------------------

    def size(self) -> int:
        """The number of tokens on all ranks."""
        return self._layout.length

    @property
    def own_size(self) -> int:
        """The number of tokens in this rank's memory."""
        return self._held

    def empty(self) -> bool:
        """True before the first token."""
        return self._layout.length == 0

    def is_trimmable(self) -> bool:
        """False once a window has dropped tokens."""
        return self._layout.window is None or self._layout.length < self._layout.window

    def trim(self, n: int) -> int:
        """Removes the last ``n`` tokens, on every rank that holds some of them; returns how many there were."""
        n = min(self._layout.length, n)
        self._held -= self._layout.trim(n)[self.group.rank()]
        return n

    @property
    def state(self) -> Any:
        """This rank's arrays, and which rank holds which tokens. To evaluate it is to wait for all communication of the
        calls before."""
        runs = mx.array(self._layout.state, mx.int64).reshape(-1, 3)
        if self.keys is None or self.values is None:
            return None, None, self._newest, runs
        return self.keys[:, :, : self._held], self.values[:, :, : self._held], self._newest, runs

    @state.setter
    def state(self, state: Any) -> None:
        self.keys, self.values, self._newest, runs = state
        self._held = 0 if self.keys is None else self.keys.shape[2]
        self._layout.state = runs.tolist()

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Refuses: keys and values keep their dtype."""
        raise ValueError(f"{NAME} kv_bits is {bits}; allowed: None. Tokens on several ranks are not quantized.")

    def split_next(self, count: int | None) -> None:
        """Says that the next call of the model has the rank's part of ``count`` tokens, as
        :func:`mlx_anvil.distributed.prefill` calls it; None takes that back."""
        self._part = count

    def settle(self) -> None:
        """Says that every rank has evaluated ``state``, which then need not hold the keys of the last call."""
        self._newest = None


def make_sharded_cache(model: nn.Module, group: mx.distributed.Group | None = None) -> list[ShardedKVCache]:
    """A :class:`ShardedKVCache` for each layer of a model of mlx-lm, as ``make_prompt_cache`` makes its caches.

    Args:
        model (mlx.nn.Module): a model of mlx-lm after :func:`mlx_anvil.patch`. Each of its layers has a ``KVCache``, or
            a ``RotatingKVCache`` that keeps no first tokens.
        group (mx.distributed.Group, optional): Default: ``mx.distributed.init()``.

    Returns:
        list[ShardedKVCache]: the ``cache=`` of the model.

    Raises:
        ImportError: mlx-lm is not installed.
        TypeError: ``model`` is no ``mlx.nn.Module``.
        ValueError: the model is not patched, or has a layer with another kind of cache.
    """
    check_patched(model, NAME)
    group = group or mx.distributed.init()
    return [ShardedKVCache(group, window_size=window) for window in windows_of(model, NAME)]

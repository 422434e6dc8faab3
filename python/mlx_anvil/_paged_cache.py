"""A paged KV cache for the models of mlx-lm: sequences of unequal length share one memory of pages."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil._extras import is_installed, need
from mlx_anvil._paged_layers import NAME, LayerCache, LayerPages, Step
from mlx_anvil.patching._routes import is_patched

Bits = int | tuple[int, int]


class PagedCache:
    """The keys and values of many sequences, in pages of one size that they take as they grow.

    A sequence takes a page when it needs one and gives its pages back when it is released, so memory follows the tokens
    that are in use. Sequences share the pages of a common prefix. Each step of a patched model runs any of the
    sequences as one batch, without padding the keys of the shorter ones.

    Args:
        model (mlx.nn.Module): a model of mlx-lm after :func:`mlx_anvil.patch`. Each of its layers has a ``KVCache``,
            or a ``RotatingKVCache`` that keeps no first tokens: then its pages hold all tokens, and the window hides
            the older ones.
        pages (int): the number of pages of each layer.
        page_size (int): tokens of a page.
        kv_bits (int or (int, int), optional): quantize keys and values as ``mx.quantize`` does: 2 to 6 or 8 bits; a
            pair is of keys and of values. Default: keep their dtype.
        kv_group_size (int): of quantized keys and values.

    Raises:
        ImportError: mlx-lm is not installed.
        TypeError: ``model`` is no ``mlx.nn.Module``, or a number is not an int.
        ValueError: the model is not patched, or has a layer with another kind of cache; a number is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pages: int,
        page_size: int = 64,
        kv_bits: Bits | None = None,
        kv_group_size: int = 64,
    ) -> None:
        check_patched(model, NAME)
        self._page_size = _count("page_size", page_size)
        self._free = list(range(_count("pages", pages)))[::-1]
        self._references: Counter[int] = Counter()
        self._options: dict[str, Any] = {}
        if kv_bits is not None:
            _check_format(kv_bits, kv_group_size)
            self._options = {"kv_bits": kv_bits, "kv_group_size": kv_group_size}
        self._layers = [LayerPages(window) for window in windows_of(model, NAME)]
        self._page_count = pages

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence holds."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages. A layer allocates its own at the first step."""
        return sum(part.nbytes for layer in self._layers for part in layer.parts())

    def new_sequence(self) -> "Sequence":
        """An empty sequence."""
        return Sequence(self)

    def step(self, sequences: SequenceOf["Sequence"], new_tokens: int | SequenceOf[int] = 1) -> list["LayerCache"]:
        """Makes room for new tokens, and returns the ``cache=`` of one call of the model.

        Args:
            sequences (sequence of Sequence): the rows of the batch; each at most once.
            new_tokens (int or sequence of int): how many tokens each sequence gets. Tokens of shorter ones are padded
                on the right; the results of padding are of no use.

        Returns:
            list[LayerCache]: a cache for each layer. It is for one call, and the sequences are longer from now on.

        Raises:
            TypeError: an entry is not a ``Sequence``, or a number is not an int.
            ValueError: there is no sequence, one is given twice, was released or belongs to another cache; the counts
                do not fit.
            RuntimeError: there are not enough free pages. Nothing has changed.
        """
        counts = self._counts(sequences, new_tokens)
        copies = self._to_copy(sequences)
        missing = [self._missing(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        needed = sum(missing) + len(copies)
        if needed > len(self._free):
            raise RuntimeError(
                f"{NAME} {needed} pages are needed and {len(self._free)} of {self._page_count} are free; release "
                "sequences, or make a cache of more pages."
            )
        self._copy_last_pages(copies)
        for sequence, more in zip(sequences, missing, strict=True):
            sequence._pages += [self._take() for _ in range(more)]
        call = Step.of(sequences, counts, self._page_size)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence._length += count
        return [LayerCache(self, layer, call) for layer in self._layers]

    # ---- pages -------------------------------------------------------------------------------------------------------

    def _counts(self, sequences: SequenceOf["Sequence"], new_tokens: int | SequenceOf[int]) -> list[int]:
        if not sequences:
            raise ValueError(f"{NAME} sequences is empty; allowed: at least one sequence.")
        for sequence in sequences:
            if not isinstance(sequence, Sequence):
                raise TypeError(f"{NAME} sequences has a {type(sequence).__name__}; allowed: Sequence.")
            if sequence._cache is not self:
                raise ValueError(f"{NAME} a sequence is of another cache, or was released; allowed: those in use.")
        if len({id(sequence) for sequence in sequences}) != len(sequences):
            raise ValueError(f"{NAME} sequences has one twice; allowed: each at most once.")
        if isinstance(new_tokens, int):
            return [_count("new_tokens", new_tokens)] * len(sequences)
        counts = [_count("new_tokens", count) for count in new_tokens]
        if len(counts) != len(sequences):
            raise ValueError(
                f"{NAME} new_tokens has {len(counts)} entries and sequences {len(sequences)}; allowed: one for each."
            )
        return counts

    def _to_copy(self, sequences: SequenceOf["Sequence"]) -> list["Sequence"]:
        """Those that write to a page that others keep; the last of its sequences writes to the page itself."""
        leaving: Counter[int] = Counter()
        copies = []
        for sequence in sequences:
            if len(sequence) % self._page_size != 0:
                page = sequence._pages[-1]
                if self._references[page] - leaving[page] > 1:
                    leaving[page] += 1
                    copies.append(sequence)
        return copies

    def _missing(self, sequence: "Sequence", count: int) -> int:
        return -(-(len(sequence) + count) // self._page_size) - len(sequence._pages)

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _share(self, pages: list[int]) -> list[int]:
        self._references.update(pages)
        return list(pages)

    def _give_back(self, pages: list[int]) -> None:
        self._references.subtract(pages)
        for page in pages:
            if self._references[page] == 0:
                del self._references[page]
                self._free.append(page)

    def _copy_last_pages(self, sequences: list["Sequence"]) -> None:
        """Gives each of the sequences a copy of its last page, which others share."""
        pairs = []
        for sequence in sequences:
            shared = sequence._pages[-1]
            sequence._pages[-1] = self._take()
            self._give_back([shared])
            pairs.append((shared, sequence._pages[-1]))
        for layer in self._layers if pairs else ():
            for part in layer.parts():
                for source, target in pairs:
                    rows = mx.contiguous(part[source])
                    mx.eval(rows)  # else it would refer to the pages, and they would be copied
                    part[target] = rows


class Sequence:
    """The tokens of one request in a :class:`PagedCache`; ``len()`` is their number. Made by ``new_sequence``."""

    def __init__(self, cache: PagedCache, pages: list[int] | None = None, length: int = 0) -> None:
        self._cache: PagedCache | None = cache
        self._pages = pages or []
        self._length = length

    def __len__(self) -> int:
        return self._length

    @property
    def pages(self) -> tuple[int, ...]:
        """The ids of its pages, in order."""
        return tuple(self._pages)

    def fork(self, length: int | None = None) -> "Sequence":
        """A sequence that begins with the first ``length`` tokens of this one, by default all. They share pages; a
        page that is partly filled is copied when one of them writes to it.

        Raises:
            TypeError: ``length`` is not an int.
            ValueError: ``length`` is out of range, or the sequence was released.
        """
        cache = self._in_use()
        length = self._up_to("length", len(self) if length is None else length)
        return Sequence(cache, cache._share(self._pages[: -(-length // cache.page_size)]), length)

    def trim(self, count: int) -> None:
        """Removes the last ``count`` tokens, such as those that speculative decoding rejects.

        Raises:
            TypeError: ``count`` is not an int.
            ValueError: ``count`` is out of range, or the sequence was released.
        """
        cache = self._in_use()
        self._length -= self._up_to("count", count)
        kept = -(-self._length // cache.page_size)
        cache._give_back(self._pages[kept:])
        del self._pages[kept:]

    def release(self) -> None:
        """Gives its pages back. The sequence cannot be used any more; a second call does nothing."""
        if self._cache is not None:
            self._cache._give_back(self._pages)
            self._cache, self._pages, self._length = None, [], 0

    def _in_use(self) -> PagedCache:
        if self._cache is None:
            raise ValueError(f"{NAME} the sequence was released; allowed: sequences in use.")
        return self._cache

    def _up_to(self, name: str, value: int) -> int:
        if type(value) is not int:
            raise TypeError(f"{NAME} {name} is a {type(value).__name__}; allowed: int.")
        if not 0 <= value <= len(self):
            raise ValueError(f"{NAME} {name} is {value}; allowed: 0 to {len(self)}, the sequence's length.")
        return value


def _count(name: str, value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{NAME} {name} has type {type(value).__name__}; allowed: int.")
    if value < 1:
        raise ValueError(f"{NAME} {name} is {value}; allowed: at least 1.")
    return value


def _check_format(bits: Any, group_size: Any) -> None:
    pair = bits if isinstance(bits, tuple) else (bits, bits)
    if len(pair) != 2 or any(b not in (2, 3, 4, 5, 6, 8) for b in pair):
        raise ValueError(f"{NAME} kv_bits is {bits}; allowed: 2, 3, 4, 5, 6, 8, a pair of them, or None.")
    if group_size not in (32, 64, 128):
        raise ValueError(f"{NAME} kv_group_size is {group_size}; allowed: 32, 64, 128.")


def check_patched(model: nn.Module, name: str) -> None:
    """Raises an error that begins with ``name`` unless it is a patched model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} model is a {type(model).__name__}; allowed: an mlx.nn.Module.")
    if not is_installed("mlx_lm"):
        raise ImportError(need(name, "mlx_lm"))
    if not any(is_patched(module) for module in model.modules()):  # type: ignore[no-untyped-call]
        raise ValueError(f"{name} model is not patched; allowed: a model after mlx_anvil.patch(model).")


def windows_of(model: nn.Module, name: str) -> list[int | None]:
    """The window of each layer's cache. Raises an error that begins with ``name`` for other kinds of caches."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    def window(cache: Any) -> int | None:
        if type(cache) is KVCache:
            return None
        if type(cache) is RotatingKVCache and cache.keep == 0:
            return int(cache.max_size)
        what = "RotatingKVCache that keeps first tokens" if type(cache) is RotatingKVCache else type(cache).__name__
        raise ValueError(f"{name} the model has a {what}; allowed: KVCache, and RotatingKVCache with keep=0.")

    return [window(cache) for cache in make_prompt_cache(model)]

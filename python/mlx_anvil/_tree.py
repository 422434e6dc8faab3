"""The mask of a tree of draft tokens, for speculative decoding."""

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

_NAME = "[Tree]"
_ATTENTION = "[flash_attention]"


class Tree:
    """A tree of draft tokens: each sees the tokens before the tree, its ancestors and itself.

    Given as ``mask=`` to :func:`mlx_anvil.flash_attention`, whose queries, and last keys, are the tokens of the tree.
    One object serves all layers of a step: it keeps the mask that it makes. With ``lengths``, the tree is at the end of
    each sequence's keys.

    Args:
        parents (sequence of int): for each token the position of its parent in the tree, which is before it; -1 for
            children of the last token before the tree. A list of such sequences, of one length, gives every batch row
            its own tree.

    Attributes:
        depths (array): ``[tokens]``, or ``[batch, tokens]``: the number of ancestors of each token in the tree. Its
            position in the text, for RoPE, is the number of tokens before the tree plus its depth.

    Raises:
        TypeError: ``parents`` is no sequence of ints.
        ValueError: it is empty, a parent is not before its child, or the trees have different lengths.
    """

    def __init__(self, parents: Sequence[int] | Sequence[Sequence[int]]) -> None:
        rows = _rows(parents)
        depths, ancestors = zip(*map(_walk, rows), strict=True)
        is_batch = not _is_int(parents[0])
        self.depths = mx.array(list(depths) if is_batch else depths[0])
        self._ancestors = mx.array(list(ancestors))[:, None]  # bool [batch or 1, 1, tokens, tokens]
        self._cached: tuple[tuple[int, int], mx.array] | None = None  # by key count and thread

    def __len__(self) -> int:
        return int(self._ancestors.shape[-1])

    def _flash_attention_mask(self, queries: mx.array, keys: Any, options: dict[str, Any]) -> mx.array:
        """The mask of a call, bool ``[batch or 1, 1, tokens, keys]``. ``options`` are those that are not None."""
        for name in ("q_lengths", "cu_seqlens_q", "cu_seqlens_k"):
            if name in options:
                raise ValueError(f"{_ATTENTION} mask is a Tree and {name} is given; allowed with a Tree: lengths.")
        count = _key_count(keys, options.get("block_table"))
        if queries.ndim == 4 and queries.shape[2] != len(self):
            raise ValueError(
                f"{_ATTENTION} q has {queries.shape[2]} queries and mask is a Tree of {len(self)} tokens; allowed: one "
                "query for each."
            )
        if count < len(self):
            raise ValueError(
                f"{_ATTENTION} k has {count} keys and mask is a Tree of {len(self)} tokens; allowed: the keys of the "
                "tree are the last ones."
            )
        lengths = options.get("lengths")
        if lengths is not None:
            return self._at_ends(lengths, count)
        key = count, threading.get_ident()  # streams are of a thread
        if self._cached is None or self._cached[0] != key:
            before = mx.ones((*self._ancestors.shape[:3], count - len(self)), mx.bool_)
            self._cached = key, mx.concatenate([before, self._ancestors], axis=-1)
        return self._cached[1]

    def _at_ends(self, lengths: mx.array, count: int) -> mx.array:
        """The mask with the tree before the end of each sequence."""
        begin = (lengths.astype(mx.int32) - len(self)).reshape(-1, 1, 1, 1)
        places = mx.arange(count) - begin  # in the tree, [batch, 1, 1, keys]
        inside = mx.clip(places, 0, len(self) - 1)
        shape = (inside.shape[0], 1, len(self))
        of_tree = mx.broadcast_to(self._ancestors, (*shape, len(self)))
        return (places < 0) | mx.take_along_axis(of_tree, mx.broadcast_to(inside, (*shape, count)), axis=-1)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rows(parents: Any) -> list[list[int]]:
    if isinstance(parents, mx.array):
        raise TypeError(f"{_NAME} parents is an mlx.core.array; allowed: a sequence of ints, such as parents.tolist().")
    if not isinstance(parents, Sequence) or isinstance(parents, str):
        raise TypeError(f"{_NAME} parents is a {type(parents).__name__}; allowed: a sequence of ints.")
    if not parents:
        raise ValueError(f"{_NAME} parents is empty; allowed: at least one token.")
    rows = (
        [list(parents)] if _is_int(parents[0]) else [list(row) if isinstance(row, Sequence) else [] for row in parents]
    )
    for row in rows:
        if len(row) != len(rows[0]) or not row:
            raise ValueError(f"{_NAME} the trees have {[len(x) for x in rows]} tokens; allowed: one number for all.")
        for token, parent in enumerate(row):
            if not _is_int(parent):
                raise TypeError(f"{_NAME} parents has a {type(parent).__name__}; allowed: ints.")
            if not -1 <= parent < token:
                raise ValueError(f"{_NAME} the parent of token {token} is {parent}; allowed: -1 to {token - 1}.")
    return rows


def _walk(parents: list[int]) -> tuple[list[int], list[list[bool]]]:
    """The depth of each token, and which tokens it sees."""
    depths: list[int] = []
    seen: list[list[bool]] = []
    for token, parent in enumerate(parents):
        row = list(seen[parent]) if parent >= 0 else [False] * len(parents)
        row[token] = True
        seen.append(row)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths, seen


def _key_count(keys: Any, block_table: mx.array | None) -> int:
    part = keys[0] if isinstance(keys, tuple | list) else keys
    if part.ndim != 4:
        raise ValueError(f"{_ATTENTION} k has shape {part.shape}; allowed: rank 4, [batch, heads, length, head_dim].")
    return int(part.shape[2] if block_table is None else part.shape[2] * block_table.shape[-1])

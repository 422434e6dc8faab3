"""Which rows of a ragged batch belong together: ``lengths``, ``starts`` and ``cu_seqlens`` of flash_attention."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Rows:
    """The sequence of each row, 0 for padding, and the row's position among the sequence's keys: ``[batch, rows]``."""

    sequence: mx.array
    position: mx.array


@dataclass(frozen=True)
class Lengths:
    """The arguments of flash_attention."""

    lengths: mx.array | None = None
    q_lengths: mx.array | None = None
    cu_seqlens_q: mx.array | None = None
    cu_seqlens_k: mx.array | None = None
    starts: mx.array | None = None

    @property
    def are_given(self) -> bool:
        """False if every row is in use."""
        return any(x is not None for x in (self.lengths, self.q_lengths, self.starts, self.cu_seqlens_q))

    def rows(self, batch: int, q_len: int, kv_len: int) -> tuple[Rows, Rows]:
        """The queries and the keys."""
        if self.cu_seqlens_q is not None:
            ends_k = self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k
            starts, lengths = zip(*(_split(ends) for ends in (self.cu_seqlens_q, ends_k)), strict=True)
            batches = mx.zeros_like(starts[0])
        else:
            given = ((self.q_lengths, q_len), (self.lengths, kv_len))
            lengths = tuple(mx.full((batch,), whole) if own is None else own.astype(mx.int32) for own, whole in given)
            starts = tuple(mx.zeros((batch,), mx.int32) for _ in range(2))
            if self.starts is not None:
                starts = starts[0], self.starts.astype(mx.int32)
                lengths = lengths[0], mx.maximum(lengths[1] - starts[1], 0)
            batches = mx.arange(batch)
        queries = _rows(batches, starts[0], lengths[0], lengths[1] - lengths[0], (batch, q_len))
        return queries, _rows(batches, starts[1], lengths[1], mx.zeros_like(lengths[1]), (batch, kv_len))


def _split(ends: mx.array) -> tuple[mx.array, mx.array]:
    ends = ends.astype(mx.int32)
    return ends[:-1], ends[1:] - ends[:-1]


def _rows(batches: mx.array, starts: mx.array, lengths: mx.array, ahead: mx.array, shape: tuple[int, int]) -> Rows:
    """`ahead` is the position of each sequence's first row."""
    place = mx.arange(shape[1]) - starts[:, None, None]  # [sequences, 1, rows]
    inside = (batches[:, None, None] == mx.arange(shape[0])[:, None]) & (place >= 0) & (place < lengths[:, None, None])
    numbers = mx.arange(1, starts.shape[0] + 1)[:, None, None]
    position = place + ahead[:, None, None]
    return Rows(mx.where(inside, numbers, 0).sum(axis=0), mx.where(inside, position, 0).sum(axis=0))

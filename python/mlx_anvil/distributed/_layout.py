"""Which rank holds which tokens of a sequence. Every rank keeps the same record, so nobody has to ask."""

from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = 64  # tokens in a row that one rank takes in decode before it is the next one's turn


@dataclass
class Run:
    """Tokens in a row on one rank."""

    start: int
    count: int
    rank: int

    @property
    def end(self) -> int:
        return self.start + self.count


class Layout:
    """The tokens of a sequence, in runs.

    Args:
        ranks: how many there are.
        window: tokens that a later query sees; it decides which rank counts as the emptiest.

    Attributes:
        length: of the sequence.
    """

    def __init__(self, ranks: int, window: int | None) -> None:
        self.ranks, self.window, self.length = ranks, window, 0
        self._runs: list[Run] = []
        self._totals = [0] * ranks

    def part_size(self, count: int) -> int:
        """The tokens of each part of ``count``; the last parts may be shorter or empty."""
        return -(-count // self.ranks)

    def split(self, count: int) -> list[int]:
        """Appends tokens of which rank r gets the r-th part; returns how many each rank gets."""
        part = self.part_size(count)
        counts = [min(part, max(0, count - rank * part)) for rank in range(self.ranks)]
        for rank, own in enumerate(counts):
            self._append(own, rank)
        return counts

    def place(self, count: int) -> tuple[list[int], list[int]]:
        """Appends tokens that every rank computes; returns where each rank's own piece of them begins and ends."""
        begins, ends = [0] * self.ranks, [0] * self.ranks
        at = 0
        for rank, piece in self._pieces(count):
            begins[rank], ends[rank] = at, at + piece
            at += piece
            self._append(piece, rank)
        return begins, ends

    def _pieces(self, count: int) -> list[tuple[int, int]]:
        if count == 1 and self._runs and self._runs[-1].count % BLOCK:
            return [(self._runs[-1].rank, 1)]
        held = self.counts(self.first_visible(self.length))
        emptiest = sorted(range(self.ranks), key=lambda rank: held[rank])
        if count <= BLOCK:
            return [(emptiest[0], count)]
        part = self.part_size(count)
        return [(rank, min(part, count - i * part)) for i, rank in enumerate(emptiest) if i * part < count]

    def _append(self, count: int, rank: int) -> None:
        if count == 0:
            return
        last = self._runs[-1] if self._runs else None
        if last is not None and last.rank == rank:
            last.count += count
        else:
            self._runs.append(Run(self.length, count, rank))
        self._totals[rank] += count
        self.length += count

    def trim(self, count: int) -> list[int]:
        """Removes the last tokens; returns how many each rank loses."""
        removed = [0] * self.ranks
        self.length -= count
        while self._runs and self._runs[-1].end > self.length:
            last = self._runs[-1]
            lost = last.end - max(self.length, last.start)
            removed[last.rank] += lost
            last.count -= lost
            if last.count == 0:
                self._runs.pop()
        self._totals = [total - lost for total, lost in zip(self._totals, removed, strict=True)]
        return removed

    def first_visible(self, position: int, window: int | None = None) -> int:
        """The first position that a query at this one sees."""
        window = window if window is not None else self.window
        return 0 if window is None else max(0, position - window + 1)

    def counts(self, first: int = 0, end: int | None = None) -> list[int]:
        """How many tokens of positions from ``first`` up to ``end`` each rank holds."""
        if first == 0 and (end is None or end == self.length):
            return list(self._totals)
        counts = [0] * self.ranks
        for rank, begin, stop in self._between(first, end):
            counts[rank] += stop - begin
        return counts

    def positions(self, rank: int, first: int = 0, end: int | None = None) -> list[int]:
        """Those of a rank's tokens, in order."""
        found = [range(begin, stop) for owner, begin, stop in self._between(first, end) if owner == rank]
        return [position for part in reversed(found) for position in part]

    def _between(self, first: int, end: int | None) -> Iterator[tuple[int, int, int]]:
        """Rank, first and end of the runs that have positions in the range, from the last one on: a window is short."""
        end = self.length if end is None else end
        for run in reversed(self._runs):
            if run.end <= first:
                return
            begin, stop = max(run.start, first), min(run.end, end)
            if begin < stop:
                yield run.rank, begin, stop

    @property
    def state(self) -> list[list[int]]:
        """The runs, as rows of numbers."""
        return [[run.start, run.count, run.rank] for run in self._runs]

    @state.setter
    def state(self, rows: list[list[int]]) -> None:
        self._runs = [Run(*row) for row in rows]
        self.length = self._runs[-1].end if self._runs else 0
        self._totals = [0] * self.ranks
        for run in self._runs:
            self._totals[run.rank] += run.count

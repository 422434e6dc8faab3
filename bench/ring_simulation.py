"""A discrete simulation of ring attention's schedule: every rank, every piece, every hop.

A rank holds a part of the sequence. Its keys and values are cut into pieces, and the pieces go round the ring one after
the other: piece p of every rank makes all its hops before piece p + 1 starts. In each step a rank computes with the
piece that it has, while it passes that piece on and receives the next. The formulas of distributed_cost.py are checked
against it, and it shows what they leave out: ranks that take longer than others.

Sources: Liu et al., Ring Attention with Blockwise Transformers (2023); the zig-zag layout, two chunks for each rank:
Llama Team, The Llama 3 Herd of Models (2024), context parallelism.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
SLOTS = 2  # pieces of others that a rank holds at a time
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Ring:
    """A sequence over ranks. The length has to be a multiple of twice the ranks times the pieces."""

    ranks: int
    length: int
    pieces: int = 8
    layout: str = CONTIGUOUS
    causal: bool = True
    window: int | None = None

    @property
    def part(self) -> int:
        """Positions of a rank."""
        return self.length // self.ranks

    def spans(self, rank: int, piece: int | None = None) -> Spans:
        """The positions of a rank, or of one of its pieces, which takes a slice of each chunk."""
        if self.layout == CONTIGUOUS:
            chunks = [(rank * self.part, self.part)]
        else:
            half = self.part // 2
            chunks = [(rank * half, half), ((2 * self.ranks - 1 - rank) * half, half)]
        if piece is None:
            return [(begin, begin + size) for begin, size in chunks]
        return [(b + piece * s // self.pieces, b + (piece + 1) * s // self.pieces) for b, s in chunks]

    def work(self, rank: int, source: int, piece: int) -> int:
        """Pairs of a query of `rank` and a key of the piece that the mask leaves visible."""
        return _work(self, rank, source, piece)

    def hops(self, source: int) -> int:
        """How far the keys of a rank travel: to the last rank that sees any of them."""
        return _hops(self, source)

    def sees(self, rank: int, source: int) -> bool:
        """Whether a query of `rank` sees a key of `source`: at best its last key before the query."""
        if not self.causal:
            return True
        for first, end in self.spans(rank):
            for begin, stop in self.spans(source):
                nearest = min(stop, end) - 1  # the last key that some query of the span does not precede
                query = max(first, nearest)
                if begin <= nearest and (self.window is None or query - nearest < self.window):
                    return True
        return False


@cache
def _work(ring: Ring, rank: int, source: int, piece: int) -> int:
    pairs = 0
    for first, end in ring.spans(rank):
        for begin, stop in ring.spans(source, piece):
            if not ring.causal:
                pairs += (end - first) * (stop - begin)
                continue
            for query in range(first, end):
                low = begin if ring.window is None else max(begin, query + 1 - ring.window)
                pairs += max(0, min(stop, query + 1) - low)
    return pairs


@cache
def _hops(ring: Ring, source: int) -> int:
    seen = (ring.sees((source + hop) % ring.ranks, source) for hop in range(1, ring.ranks))
    return max((hop for hop, visible in enumerate(seen, 1) if visible), default=0)


@dataclass(frozen=True)
class Trace:
    """What happened, rank by rank."""

    seconds: list[float]  # until the rank is done
    busy: list[float]  # of these, computing
    sent: list[float]  # bytes
    messages: list[int]

    @property
    def total(self) -> float:
        return max(self.seconds)


def slower(rank: int, factor: float) -> Callable[[int], float]:
    """One rank that takes longer to compute."""
    return lambda other: factor if other == rank else 1.0


def jitter(spread: float, seed: int) -> Callable[[int], float]:
    """Every computation takes longer by a random share, up to `spread`."""
    numbers = random.Random(seed)
    return lambda _: 1 + spread * numbers.random()


def simulate(
    ring: Ring,
    *,
    pair_seconds: float,
    piece_bytes: float,
    latency: float,
    bandwidth: float,
    gradient_bytes: float = 0.0,
    factor: Callable[[int], float] = lambda rank: 1.0,
) -> Trace:
    """Runs the schedule.

    Args:
        ring: who holds what.
        pair_seconds: time of a visible pair of a query and a key.
        piece_bytes: keys and values of a piece.
        latency: seconds of a message.
        bandwidth: bytes a second from a rank to the next.
        gradient_bytes: gradients of a piece; they travel all hops and home, each after the rank's own are added.
        factor: by which a rank's time grows, asked for every computation.
    """
    n = ring.ranks
    computed, sending = [0.0] * n, [0.0] * n  # when the rank's processor and its link are free
    busy, sent, messages = [0.0] * n, [0.0] * n, [0] * n
    slots: list[list[float]] = [[0.0] * SLOTS for _ in range(n)]  # when each is free again
    home = 0.0

    def send(rank: int, ready: float, size: float) -> float:
        sending[rank] = max(ready, sending[rank]) + latency + size / bandwidth
        sent[rank] += size
        messages[rank] += 1
        return sending[rank]

    for piece in range(ring.pieces):
        arrived, gradients = [0.0] * n, [0.0] * n
        held: list[int | None] = [None] * n  # the slot of what has arrived; None: the rank's own
        for hop in range(n):
            following, following_gradients = [0.0] * n, [0.0] * n
            following_held: list[int | None] = [None] * n
            passed = list(arrived)
            for rank in range(n):
                source, right = (rank - hop) % n, (rank + 1) % n
                if hop < ring.hops(source):
                    slot = min(range(SLOTS), key=slots[right].__getitem__)
                    passed[rank] = send(rank, max(arrived[rank], slots[right][slot]), piece_bytes)
                    following[right], following_held[right] = passed[rank], slot
                    slots[right][slot] = float("inf")
            for rank in range(n):
                source, right = (rank - hop) % n, (rank + 1) % n
                time = ring.work(rank, source, piece) * pair_seconds
                if time:
                    time *= factor(rank)
                    computed[rank] = max(arrived[rank], computed[rank]) + time
                    busy[rank] += time
                if (mine := held[rank]) is not None:
                    slots[rank][mine] = max(passed[rank], computed[rank] if time else 0.0)
                if gradient_bytes:
                    ready = max(gradients[rank], computed[rank] if time else 0.0)
                    following_gradients[right] = send(rank, ready, gradient_bytes)
            arrived, gradients, held = following, following_gradients, following_held
        home = max([home, *gradients])
    return Trace([max(time, home) for time in computed], busy, sent, messages)


def imbalance(ring: Ring) -> float:
    """The work of the busiest rank over the mean."""
    loads = [sum(ring.work(rank, source, p) for source in range(ring.ranks) for p in range(ring.pieces))
             for rank in range(ring.ranks)]  # fmt: skip
    return max(loads) / (sum(loads) / len(loads))


def all_reduce(values: Iterable[Iterable[float]]) -> tuple[list[list[float]], list[int], int]:
    """A ring all-reduce of real numbers, as MLX's: the sums of every rank, numbers sent by each, steps."""
    data = [list(row) for row in values]
    n, size = len(data), len(data[0])
    segment = -(-size // n)
    sent, steps = [0] * n, 0
    for phase in range(2):
        for step in range(n - 1):
            moves = []
            for rank in range(n):
                at = (rank - step + phase) % n
                begin, end = min(at * segment, size), min((at + 1) * segment, size)
                moves.append(((rank + 1) % n, begin, data[rank][begin:end]))
                sent[rank] += end - begin
            for to, begin, numbers in moves:
                for offset, number in enumerate(numbers, begin):
                    data[to][offset] = number if phase else data[to][offset] + number
            steps += 1
    return data, sent, steps

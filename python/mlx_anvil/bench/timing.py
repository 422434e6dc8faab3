"""Timing that is reliable on a shared machine.

The contestants run interleaved in one process (A B C, then C B A, and so on), so that drift of the machine affects all
of them alike. Each makes one untimed call before its timed ones. Results are medians with the interquartile range. A
ratio of two contestants is the median of the ratios of their rounds.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# For a call that takes this long, filling the caches is negligible: it needs no untimed call.
_LONG_SECONDS = 0.05
# The median spread of the rows is 0.1 to 0.2 on an idle machine, and 0.6 to 0.8 with one other process per core.
BUSY_SPREAD = 0.4


@dataclass
class Timing:
    """Seconds per call of one contestant: the median, the quartiles, and every round."""

    median: float
    low: float
    high: float
    rounds: list[float] = field(repr=False)

    @classmethod
    def of(cls, rounds: Sequence[float]) -> "Timing":
        """Makes a timing from the seconds per call of each round."""
        if len(rounds) == 1:
            return cls(rounds[0], rounds[0], rounds[0], list(rounds))
        low, median, high = statistics.quantiles(rounds, n=4)
        return cls(median, low, high, list(rounds))

    @property
    def spread(self) -> float:
        """Interquartile range as a fraction of the median."""
        return (self.high - self.low) / self.median


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A contestant that cycles through the calls. If their data exceeds the caches, every call reads memory."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def seconds_of(run: Callable[[], Any]) -> float:
    """Duration of one call, in seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 11,
    least_rounds: int = 3,
    least_seconds: float = 0.01,
    budget_seconds: float = 20.0,
) -> dict[str, Timing]:
    """Times every contestant. A contestant is a function that computes a result and waits for it.

    Args:
        contestants: functions by label.
        rounds: number of rounds after one warm-up; odd, so that the median is one of them.
        least_rounds: number of rounds that run even if they exceed ``budget_seconds``.
        least_seconds: duration of a round; short calls are repeated to fill it.
        budget_seconds: time limit for all rounds.

    Returns:
        dict[str, Timing]: seconds per call, by label.
    """
    once = {label: seconds_of(run) for label, run in contestants.items()}
    once = {label: t if t > _LONG_SECONDS else seconds_of(contestants[label]) for label, t in once.items()}
    calls = {label: max(1, min(1000, int(least_seconds / max(t, 1e-7)))) for label, t in once.items()}
    seconds: dict[str, list[float]] = {label: [] for label in contestants}
    order = list(contestants)
    start = time.perf_counter()
    for index in range(rounds):
        for label in order if index % 2 == 0 else reversed(order):
            # Threads of the previous contestant may still spin, and the caches hold its data.
            time.sleep(0.002)
            if once[label] < _LONG_SECONDS:
                contestants[label]()
            begin = time.perf_counter()
            for _ in range(calls[label]):
                contestants[label]()
            seconds[label].append((time.perf_counter() - begin) / calls[label])
        if index + 1 >= least_rounds and time.perf_counter() - start > budget_seconds:
            break
    return {label: Timing.of(values) for label, values in seconds.items()}


def ratio(numerator: Timing, denominator: Timing) -> float:
    """Median over the rounds of numerator / denominator, which is the speed-up of the denominator."""
    return statistics.median(a / b for a, b in zip(numerator.rounds, denominator.rounds, strict=True))


def ratio_quartiles(numerator: Timing, denominator: Timing) -> tuple[float, float]:
    """First and third quartile over the rounds of numerator / denominator."""
    ratios = Timing.of([a / b for a, b in zip(numerator.rounds, denominator.rounds, strict=True)])
    return ratios.low, ratios.high


def busy_note(spreads: Iterable[float]) -> str | None:
    """A warning if the machine was too busy for reliable times, else ``None``.

    Args:
        spreads: of each row, the larger spread of its contestants.
    """
    spreads = list(spreads)
    if not spreads or (usual := statistics.median(spreads)) <= BUSY_SPREAD:
        return None
    return (
        f"This machine was busy: the rounds of a row typically vary by {usual:.0%}. "
        "Stop other programs and measure again."
    )


def as_json(timing: Timing) -> dict[str, Any]:
    """A timing as JSON, rounded to four digits."""

    def rounded(value: float) -> float:
        return float(f"{value:.4g}")

    quartiles = {"median": rounded(timing.median), "low": rounded(timing.low), "high": rounded(timing.high)}
    return quartiles | {"rounds": [rounded(value) for value in timing.rounds]}

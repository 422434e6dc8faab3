"""Timing that can be trusted on a shared machine.

Contestants run interleaved (A B C, then C B A, and so on) in one process, so that drift of the machine's speed hits
all alike; before its timed calls each makes one that is not. Figures are medians with the spread of the middle half.
Ratios are formed round by round before the median is taken.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Filling the caches is a small part of a call that takes this long: it needs no untimed call before each timed one.
_LONG_SECONDS = 0.05
# On an idle machine the median of the rows' spreads is 0.1 to 0.2; with a process for every core it is 0.6 to 0.8.
BUSY_SPREAD = 0.4


@dataclass
class Timing:
    """Seconds per call of one contestant: median, quartiles, and every round."""

    median: float
    low: float
    high: float
    rounds: list[float] = field(repr=False)

    @classmethod
    def of(cls, rounds: Sequence[float]) -> "Timing":
        """Of the rounds' seconds; of a single one, that one."""
        if len(rounds) == 1:
            return cls(rounds[0], rounds[0], rounds[0], list(rounds))
        low, median, high = statistics.quantiles(rounds, n=4)
        return cls(median, low, high, list(rounds))

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median."""
        return (self.high - self.low) / self.median


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A contestant that makes another of the calls each time: on more data than caches hold, none finds its own there."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def seconds_of(run: Callable[[], Any]) -> float:
    """Of a single call."""
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
    """Times every contestant. A contestant is a function that computes and waits for its result.

    Args:
        contestants: label to function.
        rounds: rounds after one warm-up; odd, so that the median is one of them.
        least_rounds: see ``budget_seconds``.
        least_seconds: a round repeats a call until about this much has passed.
        budget_seconds: fewer rounds, but ``least_rounds``, are run when all of them would take longer.
    """
    once = {label: seconds_of(run) for label, run in contestants.items()}
    once = {label: t if t > _LONG_SECONDS else seconds_of(contestants[label]) for label, t in once.items()}
    calls = {label: max(1, min(1000, int(least_seconds / max(t, 1e-7)))) for label, t in once.items()}
    seconds: dict[str, list[float]] = {label: [] for label in contestants}
    order = list(contestants)
    start = time.perf_counter()
    for index in range(rounds):
        for label in order if index % 2 == 0 else reversed(order):
            # Threads of the contestant before may still be spinning, and caches still hold its data.
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
    """Median over rounds of numerator / denominator: how many times faster the denominator is."""
    return statistics.median(a / b for a, b in zip(numerator.rounds, denominator.rounds, strict=True))


def busy_note(spreads: Iterable[float]) -> str | None:
    """What to tell a reader if most rows' rounds are far apart, from the larger spread of each row's contestants;
    ``None`` if the machine was at rest."""
    spreads = list(spreads)
    if not spreads or (usual := statistics.median(spreads)) <= BUSY_SPREAD:
        return None
    return (
        f"This machine was busy: rounds of one row usually differ by {usual:.0%}. "
        "Stop other programs and measure again."
    )


def as_json(timing: Timing) -> dict[str, Any]:
    """A timing as JSON: microseconds would be noise beyond four digits."""

    def rounded(value: float) -> float:
        return float(f"{value:.4g}")

    quartiles = {"median": rounded(timing.median), "low": rounded(timing.low), "high": rounded(timing.high)}
    return quartiles | {"rounds": [rounded(value) for value in timing.rounds]}

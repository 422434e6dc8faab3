"""Timing that can be trusted on a shared machine, and the files that hold the results.

Contestants run interleaved (A B C, then C B A, and so on) in one process, so that drift of the machine's speed hits
all alike; before its timed calls each makes one that is not. Figures are medians with the spread of the middle half. Ratios
are formed round by round before the median is taken.
"""

import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import mlx_anvil

RESULTS = Path(__file__).parent / "results"


@dataclass
class Timing:
    """Seconds per call of one contestant: median, quartiles, and every round."""

    median: float
    low: float
    high: float
    rounds: list[float] = field(repr=False)

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median."""
        return (self.high - self.low) / self.median


def _calls_per_round(run: Callable[[], Any], least_seconds: float) -> int:
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    return max(1, min(1000, int(least_seconds / max(once, 1e-7))))


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A contestant that makes another of the calls each time: on more data than caches hold, none finds its own there."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def measure(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 11,
    least_seconds: float = 0.01,
    budget_seconds: float = 20.0,
) -> dict[str, Timing]:
    """Times every contestant. A contestant is a function that computes and waits for its result.

    Args:
        contestants: label to function.
        rounds: rounds after one warm-up; odd, so that the median is one of them.
        least_seconds: a round repeats a call until about this much has passed.
        budget_seconds: fewer rounds (at least three) are run when all of them would take longer.
    """
    for run in contestants.values():
        run()
    calls = {label: _calls_per_round(run, least_seconds) for label, run in contestants.items()}
    seconds: dict[str, list[float]] = {label: [] for label in contestants}
    order = list(contestants)
    start = time.perf_counter()
    for index in range(rounds):
        for label in order if index % 2 == 0 else reversed(order):
            # Threads of the contestant before may still be spinning, and caches still hold its data.
            time.sleep(0.002)
            contestants[label]()
            begin = time.perf_counter()
            for _ in range(calls[label]):
                contestants[label]()
            seconds[label].append((time.perf_counter() - begin) / calls[label])
        if index >= 2 and time.perf_counter() - start > budget_seconds:
            break
    return {label: _timing(values) for label, values in seconds.items()}


def _timing(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, low, high, values)


def ratio(numerator: Timing, denominator: Timing) -> float:
    """Median over rounds of numerator / denominator: how many times faster the denominator is."""
    return statistics.median(a / b for a, b in zip(numerator.rounds, denominator.rounds, strict=True))


def machine() -> dict[str, Any]:
    """What a reader has to know to place the figures."""
    facts: dict[str, Any] = dict(mlx_anvil.info())
    facts["cpu_model"] = _cpu_model()
    facts["commit"] = _commit()
    facts["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"


def write_results(name: str, rows: list[dict[str, Any]]) -> Path:
    """Writes ``bench/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{{\n"machine": {json.dumps(machine(), indent=1)},\n"rows": [\n{lines}\n]\n}}\n')
    return path


def as_json(timing: Timing) -> dict[str, Any]:
    """A timing as JSON: microseconds would be noise beyond four digits."""

    def rounded(value: float) -> float:
        return float(f"{value:.4g}")

    quartiles = {"median": rounded(timing.median), "low": rounded(timing.low), "high": rounded(timing.high)}
    return quartiles | {"rounds": [rounded(value) for value in timing.rounds]}

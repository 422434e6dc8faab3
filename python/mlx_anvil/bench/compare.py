"""Two runs set side by side: which rows became faster, which slower, and which only differ as rounds of one run do.

A verdict needs both: the rounds of one run have to lie above those of the other beyond what chance would do (the test of
Mann and Whitney, which asks nothing of the distribution: timings have long tails), and the medians have to differ by
more than runs of the same build on a machine with other users do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_anvil.bench.results import Row
from mlx_anvil.bench.timing import Timing

Verdict = Literal["faster", "slower", "same"]

# Chance of a verdict on a row where nothing changed. Below three in a thousand five rounds a side can say nothing.
SIGNIFICANCE = 0.01
# Alignment of memory and order of code alone move medians by so much between builds.
LEAST_CHANGE = 0.03


@dataclass(frozen=True)
class Change:
    """One row in both runs. ``ratio``: time before over time now, above 1 if it is faster now; ``baseline`` likewise of
    MLX, which did not change: if it moved as well, the machine did."""

    before: Row
    now: Row
    verdict: Verdict
    ratio: float
    baseline: float


def tail_probability(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided probability, were both drawn alike, of ``a`` and ``b`` being at least as far apart in rank; exact without
    ties, and otherwise no smaller than that (equal values count half, and the statistic is rounded towards no difference).
    """
    wins = sum((x > y) + 0.5 * (x == y) for x in a for y in b)
    fewer = math.ceil(min(wins, len(a) * len(b) - wins))
    orders = _orders(len(a), len(b))
    return min(1.0, 2 * sum(orders[: fewer + 1]) / sum(orders))


def _orders(m: int, n: int) -> list[int]:
    """Element ``u``: of the orders of ``m`` and ``n`` values, how many have ``u`` pairs the other way round.

    These are the coefficients of the Gaussian binomial (m + n over m), the product over i of (1 - q^(n+i)) / (1 - q^i).
    """
    counts = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for u in range(m * n, n + i - 1, -1):
            counts[u] -= counts[u - n - i]
        for u in range(i, m * n + 1):
            counts[u] += counts[u - i]
    return counts


def verdict(before: Timing, now: Timing) -> Verdict:
    """Whether ``now`` is faster or slower than ``before``, beyond the spread of the rounds."""
    change = before.median / now.median
    if max(change, 1 / change) < 1 + LEAST_CHANGE or tail_probability(before.rounds, now.rounds) > SIGNIFICANCE:
        return "same"
    return "faster" if change > 1 else "slower"


def compare(before: Sequence[Row], now: Sequence[Row]) -> list[Change]:
    """The rows that are in both, in the order of ``now``."""
    earlier = {row.key: row for row in before}
    return [
        Change(
            earlier[row.key],
            row,
            verdict(earlier[row.key].ours, row.ours),
            earlier[row.key].ours.median / row.ours.median,
            earlier[row.key].mlx.median / row.mlx.median,
        )
        for row in now
        if row.key in earlier
    ]

"""Compares two runs: which rows became faster, which slower, and which differ by noise alone.

A verdict needs two things. A Mann-Whitney U test on the rounds must reject equality; it makes no assumption about the
distribution, and timings have long tails. And the medians must differ by more than two runs of the same build do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_anvil.bench.results import Row
from mlx_anvil.bench.timing import Timing

Verdict = Literal["faster", "slower", "same"]

# The probability of a false verdict on an unchanged row. With five rounds per side, the smallest p-value is 0.008.
SIGNIFICANCE = 0.01
# Memory alignment and code layout alone change medians by this much between builds.
LEAST_CHANGE = 0.03


@dataclass(frozen=True)
class Change:
    """One row that both runs have.

    Attributes:
        before: the row in the first run.
        now: the row in the second run.
        verdict: ``"faster"``, ``"slower"`` or ``"same"``.
        ratio: time before over time now; above 1 is faster.
        baseline: the same ratio for MLX, whose code did not change; it shows drift of the machine.
    """

    before: Row
    now: Row
    verdict: Verdict
    ratio: float
    baseline: float


def tail_probability(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p-value of the Mann-Whitney U test of ``a`` and ``b``.

    It is exact without ties. With ties it is an upper bound: equal values count half, and U is rounded towards
    equality.
    """
    wins = sum((x > y) + 0.5 * (x == y) for x in a for y in b)
    fewer = math.ceil(min(wins, len(a) * len(b) - wins))
    orders = _orders(len(a), len(b))
    return min(1.0, 2 * sum(orders[: fewer + 1]) / sum(orders))


def _orders(m: int, n: int) -> list[int]:
    """Element ``u`` is the number of orders of ``m`` and ``n`` values for which the statistic U is ``u``.

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
    """``"faster"`` or ``"slower"`` if ``now`` differs significantly from ``before``, else ``"same"``."""
    change = before.median / now.median
    if max(change, 1 / change) < 1 + LEAST_CHANGE or tail_probability(before.rounds, now.rounds) > SIGNIFICANCE:
        return "same"
    return "faster" if change > 1 else "slower"


def compare(before: Sequence[Row], now: Sequence[Row]) -> list[Change]:
    """The rows that both runs have, in the order of ``now``."""
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

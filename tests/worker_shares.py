"""The order of tests in a run on several cores: what takes long starts first, so that no core waits for it at the end.

pytest-xdist (``--dist worksteal``) gives each worker one part of the list, and a worker without work takes the end of
another one's part.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
LONG = ("slow", "long")  # markers


def shares(things: Sequence[T], workers: int) -> Iterator[Sequence[T]]:
    """Cuts a list where pytest-xdist does."""
    start = 0
    for left in range(workers, 0, -1):
        size = (len(things) - start) // left
        yield things[start : start + size]
        start += size


def long_first(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Spreads the long tests over the workers' parts, at the start of each. The others keep their order."""
    long = [item for item in items if any(item.get_closest_marker(name) for name in LONG)]
    known = set(map(id, long))
    rest = [item for item in items if id(item) not in known]
    spread = [item for worker in range(workers) for item in long[worker::workers]]
    ordered: list[pytest.Item] = []
    for share, first in zip(shares(items, workers), shares(spread, workers), strict=True):
        count = len(share) - len(first)
        ordered += [*first, *rest[:count]]
        del rest[:count]
    return ordered

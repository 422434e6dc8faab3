"""The order of tests on several cores: long tests start first, so that no core waits for one at the end.

pytest-xdist (``--dist worksteal``) gives each worker a part of the list, and an idle worker takes the end of another
worker's part.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
LONG = ("slow", "long")  # markers


def shares(things: Sequence[T], workers: int) -> Iterator[Sequence[T]]:
    """Splits a list as pytest-xdist does."""
    start = 0
    for left in range(workers, 0, -1):
        size = (len(things) - start) // left
        yield things[start : start + size]
        start += size


def long_first(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Puts the long tests at the start of the workers' parts. The others keep their order."""
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

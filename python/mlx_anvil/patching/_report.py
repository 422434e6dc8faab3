"""The report of ``patch()``: calls that were swapped, calls that were not, and fallbacks since."""

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from mlx_anvil import _ext
from mlx_anvil._prebuild import Prebuilt


@dataclass(frozen=True)
class Row:
    """One call of one module.

    Attributes:
        path: path of the module in the model, such as ``"model.layers.0.mlp"``; empty for the model itself.
        what: the function that the module calls, such as ``"mx.fast.rms_norm"``.
        op: our op for the call; empty if there is none.
        why: the class of the module if the call was swapped, else the reason why not.
    """

    path: str
    what: str
    op: str
    why: str


@dataclass(frozen=True)
class Fallback:
    """Calls of swapped modules that ran as before the patch.

    Attributes:
        op: the op that did not support them.
        reason: why it did not.
        count: number of calls.
    """

    op: str
    reason: str
    count: int


class FallbackLog:
    """Counts fallbacks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, op: str, reason: str) -> None:
        """Counts a call that ``trace()`` and ``strict()`` have seen already."""
        with self._lock:
            self._counts[op, reason] += 1

    def note(self, op: str, reason: str) -> None:
        """Counts a call, and reports it to ``trace()`` and ``strict()``, which raises RuntimeError."""
        self.add(op, reason)
        _ext._note_fallback(op, reason)

    def rows(self) -> tuple[Fallback, ...]:
        """The counts, most frequent first."""
        with self._lock:
            return tuple(Fallback(op, reason, count) for (op, reason), count in self._counts.most_common())


@dataclass(frozen=True)
class Report:
    """The result of ``patch``. Prints as a table, in which equal layers share a line.

    Attributes:
        model: name of the model's class.
        swapped: calls that our ops replace.
        left: calls that were not swapped, with the reason.
        prebuilt: the pipelines of ``patch(model, prebuild=True)``, else None.
    """

    model: str
    swapped: tuple[Row, ...]
    left: tuple[Row, ...]
    prebuilt: Prebuilt | None = None
    log: FallbackLog = field(default_factory=FallbackLog, repr=False, compare=False)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Calls of swapped modules that ran as before the patch, counted since, most frequent first."""
        return self.log.rows()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.swapped:
            yield f"{self.model}: nothing to swap."
        else:
            table = _table(f"{self.model}: swapped", "modules", "", "call", "op", "made by")
            for paths, count, row in _grouped(self.swapped):
                _add(table, paths, f"x {count}", row.what, row.op, row.why)
            yield table
        if self.left:
            table = _table("not swapped", "modules", "", "call", "why")
            for paths, count, row in _grouped(self.left):
                _add(table, paths, f"x {count}", row.what, row.why)
            yield table
        if self.fallbacks:
            table = _table("calls that fell back", "op", "", "why")
            for fallback in self.fallbacks:
                _add(table, fallback.op, f"x {fallback.count}", fallback.reason)
            yield table

    def __str__(self) -> str:
        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if not column else "left")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))  # as Text, because rich would parse "[batch]" in a reason as markup


def _grouped(rows: Iterable[Row]) -> Iterator[tuple[str, int, Row]]:
    """Groups rows whose paths differ only in numbers. Yields the path with stars, the count, and one row."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        alike = Row(re.sub(r"\b\d+\b", "*", row.path), row.what, row.op, row.why)
        groups.setdefault(alike, []).append(row)
    for alike, members in groups.items():
        yield (alike if len(members) > 1 else members[0]).path or "(the model)", len(members), members[0]

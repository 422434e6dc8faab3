"""The report of ``patch()``: calls that were swapped, calls that were not, and fallbacks since."""

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from mlx_anvil import _ext
from mlx_anvil._prebuild import Prebuilt
from mlx_anvil._tables import Table, as_html, as_text, plural
from mlx_anvil.patching._advice import advice, fallback_advice


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
    """The result of ``patch``. Prints as tables, in which equal layers share a line; in a notebook, as HTML.

    Attributes:
        model: name of the model's class.
        swapped: calls that our ops replace.
        left: calls that were not swapped, with the reason.
        prebuilt: the pipelines of ``patch(model, prebuild=True)``, else None.
        repacked: how many layers have scales and biases of 16 bits by ``patch(model, repack=True)``.
    """

    model: str
    swapped: tuple[Row, ...]
    left: tuple[Row, ...]
    prebuilt: Prebuilt | None = None
    repacked: int = 0
    log: FallbackLog = field(default_factory=FallbackLog, repr=False, compare=False)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Calls of swapped modules that ran as before the patch, counted since, most frequent first."""
        return self.log.rows()

    @property
    def summary(self) -> str:
        """One sentence: how many calls were swapped, each of each module once, and how many layers repacked, if any."""
        total = len(self.swapped) + len(self.left)
        if not self.swapped:
            return f"{self.model}: nothing to swap."
        repacked = f", {plural(self.repacked, 'layer')} repacked" if self.repacked else ""
        return f"{self.model}: {len(self.swapped)} of {plural(total, 'call')} swapped{repacked}."

    def _tables(self) -> Iterator[Table]:
        heads, figures, elastic = ("modules", "", "call", "op"), frozenset((1,)), {2: 19, 0: 12}
        swapped = Table("Swapped", heads, figures, elastic)
        for paths, count, row in _grouped(self.swapped):
            swapped.rows.append((paths, f"x {count}", row.what, row.op))
        yield swapped
        left, steps = Table("Left as it was, and why", heads[:3], figures, elastic), Table("What to do about it")
        for paths, count, row in _grouped(self.left):
            left.rows += [(paths, f"x {count}", row.what), f"  {row.why}"]
        names: dict[str, dict[str, None]] = {}  # of the calls, by what to do; in order, without repeats
        for row in self.left:
            names.setdefault(advice(row.why), {})[row.what] = None
        steps.rows += [f"{', '.join(calls)}: {text}" for text, calls in names.items()]
        yield left
        yield steps
        fell, after = Table("Calls that fell back since, and why"), Table("What to do about those")
        for fallback in self.fallbacks:
            fell.rows.append(f"x {fallback.count}  {fallback.op}: {fallback.reason}")
        after.rows += dict.fromkeys(f"{f.op}: {fallback_advice(f.reason)}" for f in self.fallbacks)
        yield fell
        yield after

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(as_text(self.summary, self._tables(), options.max_width))

    def __str__(self) -> str:
        return as_text(self.summary, self._tables())

    def _repr_html_(self) -> str:
        return as_html(self.summary, self._tables())


def _grouped(rows: Iterable[Row]) -> Iterator[tuple[str, int, Row]]:
    """Groups rows whose paths differ only in numbers. Yields the path with stars, the count, and one row."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        alike = Row(re.sub(r"\b\d+\b", "*", row.path), row.what, row.op, row.why)
        groups.setdefault(alike, []).append(row)
    for alike, members in groups.items():
        yield (alike if len(members) > 1 else members[0]).path or "(the model)", len(members), members[0]

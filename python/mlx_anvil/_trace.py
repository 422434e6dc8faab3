"""``trace()`` records the kernels that ops launch; ``strict()`` raises if an op would fall back to MLX ops."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from mlx_anvil import _ext
from mlx_anvil._block import Block
from mlx_anvil._tables import Table, as_html, as_text, plural


@dataclass(frozen=True)
class Event:
    """One kernel launch, or one op replaced by a graph of MLX ops.

    Attributes:
        op: Python name of the op.
        kernel: name of the kernel, with its specialisation; empty for a fallback.
        device: where it ran, such as ``"metal"`` or ``"cpu (avx512)"``. ``"cuda (sm_90)"`` ran a cubin of the package,
            ``"cuda"`` ran PTX that the driver assembled. Empty for a fallback.
        grid: threadgroups launched; zeros on the CPU.
        threadgroup: threads per threadgroup; zeros on the CPU.
        is_fallback: True if MLX ops ran instead of a kernel.
        reason: why the op chose this kernel or fallback.
        bindings: buffers of a GPU kernel in binding order: ``"float16 in"``, ``"float32 out"``, ``"params 40"``
            (bytes). ``"float16 in =0"`` repeats the array of binding 0 for an operand that the call does not have.
        start: when it was launched or fell back, in seconds since the block was entered. Of a CPU kernel that has run:
            when it began to run.
        seconds: how long a CPU kernel ran; None on a GPU, for a fallback, and before the kernel has run.
    """

    op: str
    kernel: str
    device: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    is_fallback: bool
    reason: str
    bindings: tuple[str, ...] = ()
    start: float = field(default=0.0, compare=False)
    seconds: float | None = field(default=None, compare=False)


def _extent(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = sizes
    return (x, y, z)


class Trace:
    """The events of one ``with trace()`` block, in order. Prints as tables; in a notebook, as HTML."""

    def __init__(self, log: _ext._TraceLog) -> None:
        self._log = log

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return [
            Event(
                op=e.op,
                kernel=e.kernel,
                device=e.device,
                grid=_extent(e.grid),
                threadgroup=_extent(e.threadgroup),
                is_fallback=e.is_fallback,
                reason=e.reason,
                bindings=tuple(e.bindings),
                start=((e.began if e.ended else e.noted) - self._log.entered) / 1e9,
                seconds=(e.ended - e.began) / 1e9 if e.ended else None,
            )
            for e in self._log.events()
        ]

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels launched so far."""
        return [event.kernel for event in self.events if not event.is_fallback]

    @property
    def fallbacks(self) -> list[Event]:
        """Events of the ops that MLX ops replaced so far."""
        return [event for event in self.events if event.is_fallback]

    def _report(self) -> tuple[str, list[Table]]:
        """A sentence, and the tables: equal events share a line, and every op has its totals."""
        events = self.events
        kernels, fallbacks = Counter[Event](), Counter[Event]()
        for event in events:
            (fallbacks if event.is_fallback else kernels)[_without_time(event)] += 1
        devices = ", ".join(dict.fromkeys(event.device for event in kernels))
        ops = len({event.op for event in events})
        launches = plural(kernels.total(), "kernel") + (f" on {devices}" if devices else "")
        summary = f"{launches}, {plural(fallbacks.total(), 'fallback')} to MLX's ops; {plural(ops, 'op')}."
        tables = [_kernel_table(kernels), Table("Fallbacks to MLX's ops, and why"), _total_table(events)]
        tables[1].rows += [f"x {count}  {event.op}: {event.reason}" for event, count in fallbacks.items()]
        return summary, tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(as_text(*self._report(), options.max_width))

    def __str__(self) -> str:
        return as_text(*self._report())

    def _repr_html_(self) -> str:
        return as_html(*self._report())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the events in Chrome's trace event format, which https://ui.perfetto.dev and chrome://tracing open.

        A CPU kernel that has run is a slice with its duration. A launch on a GPU and a fallback are instants: how long
        a kernel runs there is what Xcode's GPU trace or Nsight shows.

        Args:
            path (str | os.PathLike): the file to write, such as ``"trace.json"``.
        """
        Path(path).write_text(json.dumps(self._chrome_trace(), indent=1) + "\n")

    def _chrome_trace(self) -> dict[str, Any]:
        events = self.events
        rows = _rows_of(events)
        names = dict(sorted(zip(rows, map(_row_name, events), strict=True)))
        heads = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}}
            for row, name in names.items()
        ]
        process = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "mlx_anvil"}}
        found = [_chrome_event(event, row) for event, row in zip(events, rows, strict=True)]
        return {"traceEvents": [process, *heads, *found], "displayTimeUnit": "ms"}


def _without_time(event: Event) -> Event:
    return replace(event, start=0.0, seconds=None)


def _kernel_table(kernels: Counter[Event]) -> Table:
    """The columns that have contents: a CPU kernel has no grid, and often there is one device."""
    table = Table("Kernels", ("", "kernel"), frozenset((0,)), elastic={1: 30}, folds=True)
    several = len({event.device for event in kernels}) > 1
    has_grid = any(any(event.grid) for event in kernels)
    table.heads += ("grid", "threads") * has_grid + ("device",) * several
    for event, count in kernels.items():
        extents = tuple(
            " x ".join(map(str, extent)) if any(extent) else "" for extent in (event.grid, event.threadgroup)
        )
        table.rows.append((f"x {count}", event.kernel, *extents * has_grid, *(event.device,) * several))
        if event.reason:
            table.rows.append(f"  {event.reason}")
    return table


def _total_table(events: Sequence[Event]) -> Table:
    """How often each op ran as a kernel and fell back, and how long its CPU kernels took."""
    is_timed = any(event.seconds is not None for event in events)
    table = Table("Totals", ("op", "kernels", "fallbacks") + ("ms",) * is_timed, frozenset((1, 2, 3)))
    for op in dict.fromkeys(event.op for event in events):
        own = [event for event in events if event.op == op]
        fallbacks = sum(event.is_fallback for event in own)
        seconds = sum(event.seconds or 0.0 for event in own)
        table.rows.append((op, str(len(own) - fallbacks), str(fallbacks), *(f"{seconds * 1e3:.3f}",) * is_timed))
    return table


def _row_name(event: Event) -> str:
    return "fallbacks" if event.is_fallback else event.device


def _rows_of(events: Sequence[Event]) -> list[int]:
    """The row of a trace viewer for each event, from 1. Kernels of two CPU streams overlap, and a row cannot show
    that."""
    ends: list[tuple[str, float]] = []  # name of each row, and end of its last event
    rows = [0] * len(events)
    for index in sorted(range(len(events)), key=lambda index: events[index].start):
        event = events[index]
        name, end = _row_name(event), event.start + (event.seconds or 0.0)
        fits = (number for number, row in enumerate(ends) if row[0] == name and row[1] <= event.start)
        number = next(fits, len(ends))
        ends[number : number + 1] = [(name, end)]
        rows[index] = number + 1
    return rows


def _chrome_event(event: Event, row: int) -> dict[str, Any]:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: times are microseconds."""
    facts: dict[str, Any] = {"op": event.op}
    if event.reason:
        facts["reason"] = event.reason
    if any(event.grid):
        facts |= {"grid": event.grid, "threadgroup": event.threadgroup, "bindings": event.bindings}
    common = {"name": event.kernel or event.op, "cat": "fallback" if event.is_fallback else "kernel", "args": facts}
    place = {"pid": 1, "tid": row, "ts": event.start * 1e6}
    if event.seconds is None:
        return {"ph": "i", "s": "t"} | common | place
    return {"ph": "X", "dur": event.seconds * 1e6} | common | place


def trace() -> Block[Trace]:
    """Records every kernel that this thread (or asyncio task) launches inside the block, and every fallback with its
    reason.

    MLX is lazy and launches a kernel when its result is evaluated, so evaluate inside the block. Blocks nest.

    Returns:
        Block: use it as ``with trace() as t``. ``t`` is a ``Trace`` with the events so far.

    Raises:
        RuntimeError: the same block is entered twice.

    Examples:
        >>> with mlx_anvil.trace() as t:
        ...     mx.eval(mlx_anvil.silu_gate(gate, up))
        >>> print(t)
    """

    def enter() -> tuple[_ext._Block, Trace]:
        block = _ext._enter_trace()
        return block, Trace(block.log)

    return Block("trace", enter)


def strict() -> Block[None]:
    """Inside the block, an op of this thread (or asyncio task) raises instead of falling back to a graph of MLX ops.

    The op, or its gradient, raises when it is called, before anything is evaluated. Blocks nest.

    Returns:
        Block: use it as ``with strict():``, or as a decorator.

    Raises:
        RuntimeError: an op inside the block would fall back; the text names the op and the reason that ``trace()``
            shows. Also if the same block is entered twice.
    """
    return Block("strict", lambda: (_ext._enter_strict(), None))

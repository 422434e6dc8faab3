"""What the benchmarks of this folder share beyond :mod:`mlx_anvil.bench`: files of results that name the commit."""

import functools
import json
import math
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.table import Table

from mlx_anvil import _ext
from mlx_anvil._check import dtype_name
from mlx_anvil._extras import explain_missing_modules, need
from mlx_anvil.bench.results import machine
from mlx_anvil.bench.timing import Timing, as_json, in_turn, measure, ratio

__all__ = [
    "CALLS_IN_A_GRAPH",
    "RESULTS",
    "Timing",
    "as_json",
    "comparison",
    "console_table",
    "copies",
    "forget_peak",
    "in_a_graph",
    "in_turn",
    "installed_torch",
    "label_bars",
    "measure",
    "on_other_data",
    "operand_sets",
    "peak_bytes",
    "per_call",
    "plain_ticks",
    "ratio",
    "resident",
    "share_of_copy",
    "slowest",
    "write_results",
]

explain_missing_modules(matplotlib="bench", mlx_lm="bench", numpy="bench")

RESULTS = Path(__file__).parent / "results"
CALLS_IN_A_GRAPH = 64
_BEYOND_CACHES = 160 << 20


@functools.cache
def installed_torch() -> Any:
    """PyTorch; None if it is not installed, and then a line on stderr says so once."""
    try:
        import torch
    except ModuleNotFoundError:
        print(need("a comparison with PyTorch", "torch"), file=sys.stderr)
        return None
    return torch


def plain_ticks(axis: Any) -> None:
    """Labels a logarithmic axis with plain numbers instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def label_bars(
    axis: Any, places: Sequence[float], heights: Sequence[float], timings: Sequence[Any], digits: int = 2
) -> None:
    """Writes the heights above bars that show rates, and draws the interquartile range of the times they come from.

    A timing is as a file of results has it. Its shortest time is the highest rate. None draws nothing.
    """
    for place, height, timing in zip(places, heights, timings, strict=True):
        top = height
        if timing is not None and "low" in timing:
            ends = [height * timing["median"] / timing[key] for key in ("low", "high")]
            axis.plot([place, place], ends, color="black", linewidth=0.8, solid_capstyle="butt")
            top = max(height, *ends)
        text = f"{height:.0f}" if height >= 10 else f"{height:.{digits}g}"
        axis.annotate(text, (place, top), (0, 1), textcoords="offset points", fontsize=7, ha="center")


def copies(total_bytes: int, sets: int = 1) -> dict[str, Callable[[], None]]:
    """Copies, by memcpy and by stores past the cache, that each read and write `total_bytes` together. Calls take turns
    over `sets` pairs of arrays.

    The arrays are in MLX's memory, like those of the ops: NumPy asks for huge pages where MLX does not.
    """
    import numpy as np

    count = max(1, total_bytes // 8)
    pairs = [tuple(np.asarray(mx.ones(count)) for _ in range(2)) for _ in range(sets)]
    return {
        "copy": in_turn([lambda p=p: _ext._copy(*p, False) for p in pairs]),
        "copy past the cache": in_turn([lambda p=p: _ext._copy(*p, True) for p in pairs]),
    }


def share_of_copy(
    ours: Callable[[], None], total_bytes: int, *, sets: int = 1, rounds: int, budget_seconds: float
) -> tuple[float, dict[str, Timing]]:
    """Share of the bandwidth of the faster of ``copies`` that ``ours`` reaches, and what all of them took."""
    timings = measure(copies(total_bytes, sets) | {"ours": ours}, rounds=rounds, budget_seconds=budget_seconds)
    copy = min((timings["copy"], timings["copy past the cache"]), key=lambda t: t.median)
    return round(ratio(copy, timings["ours"]), 3), timings


@functools.cache
def _numbers(dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((_BEYOND_CACHES // dtype.size,)).astype(dtype)


def operand_sets(shapes: Sequence[tuple[int, ...]], dtype: mx.Dtype, total_bytes: int) -> list[list[mx.array]]:
    """Operands of these shapes for one call after the other, until caches hold nothing of the first call's; a call
    reads and writes ``total_bytes`` in all."""
    numbers, at = _numbers(dtype), 0
    sets: list[list[mx.array]] = []
    for _ in range(max(2, -(-_BEYOND_CACHES // total_bytes))):
        sets.append([])
        for shape in shapes:
            size = math.prod(shape)
            sets[-1].append(numbers[at : at + size].reshape(shape))
            at += size
    mx.eval(sets)
    return sets


def on_other_data(op: Callable[..., Any], sets: Sequence[Sequence[mx.array]]) -> Callable[[], None]:
    """A contestant that finds neither its operands nor its outputs' memory in a cache, as calls of large ops in a
    model.

    Every call has the next set of operands, and as many results as there are sets are kept. All are made once before
    anything is timed: until the first of them is dropped, every result is memory that nobody has touched.
    """
    kept: deque[Any] = deque(maxlen=len(sets))

    def call(operands: Sequence[mx.array]) -> None:
        kept.append(op(*operands))
        mx.eval(kept[-1])

    for operands in sets:
        call(operands)
    return in_turn([lambda s=s: call(s) for s in sets])


def in_a_graph(op: Callable[[], Any]) -> Callable[[], None]:
    """A contestant of ``CALLS_IN_A_GRAPH`` calls that are evaluated together, as in a model's step: the thread of MLX's
    CPU stream is woken and waited for once."""
    return lambda: mx.eval([op() for _ in range(CALLS_IN_A_GRAPH)])


def per_call(timing: Timing) -> Timing:
    """The time of one call, from that of ``in_a_graph``."""
    return Timing.of([seconds / CALLS_IN_A_GRAPH for seconds in timing.rounds])


def comparison(
    what: str,
    dtype: mx.Dtype,
    shape: tuple[int, ...],
    contestants: dict[str, Callable[[], Any]],
    *,
    rounds: int,
    budget_seconds: float,
    **more: Any,
) -> dict[str, Any]:
    """One row of results; "ours" is what all other contestants are set against."""
    timings = measure(contestants, rounds=rounds, budget_seconds=budget_seconds)
    ours = timings["ours"]
    return {
        "op": what,
        "dtype": dtype_name(dtype),
        "shape": list(shape),
        **more,
        "spread": round(ours.spread, 3),
        "speedup": {label: round(ratio(t, ours), 3) for label, t in timings.items() if label != "ours"},
        "seconds": {label: as_json(t) for label, t in timings.items()},
    }


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most memory that a second call holds at a time beyond what is held already."""
    call()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    call()
    return mx.get_peak_memory() - before


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak() -> None:
    """Has ``resident("VmHWM:")`` and MLX's peak count from here on."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")
    mx.reset_peak_memory()


def resident(field: str) -> int:
    """The bytes of ``"VmRSS:"``, or of ``"VmHWM:"``, its highest; 0 where there is no such file."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def slowest(of_processes: Iterable[Sequence[float]], calls: int = 1) -> Timing:
    """Of processes that make a round at the same time, the slowest counts. Each made that many calls."""
    return Timing.of([max(seconds) / calls for seconds in zip(*of_processes, strict=True)])


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"


def write_results(name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Writes ``bench/results/<name>.json``: the machine, then what ``more`` says, then a line for each row."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    head = {"machine": machine() | {"commit": _commit()}, **more}
    parts = "".join(f'"{key}": {json.dumps(value, indent=1)},\n' for key, value in head.items())
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{{\n{parts}"rows": [\n{lines}\n]\n}}\n')
    return path


def console_table(title: str, *, words: Iterable[str] = (), figures: Iterable[str] = ()) -> Table:
    """An empty table with columns of words and then, to the right, of figures."""
    table = Table(title=title)
    for name in words:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right")
    return table

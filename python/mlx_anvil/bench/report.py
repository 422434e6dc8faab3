"""Results as tables and as a picture."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from rich.table import Table

from mlx_anvil._cli import time_text
from mlx_anvil.bench.compare import LEAST_CHANGE, SIGNIFICANCE, Change
from mlx_anvil.bench.results import Results, Row

_COLORS = {"float32": "#2f4b8f", "float16": "#e07a1f", "bfloat16": "#0b6e4f"}
_VERDICTS = {"faster": "green", "slower": "bold red", "same": "dim"}
_MACHINE = ("cpu_model", "threads", "isa", "mlx", "mlx_anvil")


def _grid(names: Sequence[str], figures: Sequence[str], **options: str) -> Table:
    table = Table(**options)  # type: ignore[arg-type]
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _in_groups(table: Table, rows: Sequence[tuple[Row, list[str]]]) -> Table:
    previous = None
    for row, cells in rows:
        group = (row.suite, row.name.partition(",")[0].partition("/")[0] if row.suite == "op" else "")
        if previous not in (None, group):
            table.add_section()
        previous = group
        table.add_row(row.suite, row.name, row.dtype, row.shape, row.backend, *cells)
    return table


def table(results: Results) -> Table:
    """One line a row; the spread is that of ours."""
    grid = _grid(
        ("suite", "", "dtype", "shape", "backend"),
        ("ours", "spread", "MLX", "speed-up"),
        title="Medians; spread: between the quartiles, as a share of the median",
    )
    lines = []
    for row in results.rows:
        color = "green" if row.speedup >= 1 else "red"
        cells = [time_text(row.ours.median), f"{row.ours.spread:.0%}", time_text(row.mlx.median)]
        lines.append((row, [*cells, f"[{color}]{row.speedup:.2f}x[/{color}]"]))
    return _in_groups(grid, lines)


def comparison(changes: Sequence[Change]) -> Table:
    """One line a row that both runs have."""
    grid = _grid(
        ("suite", "", "dtype", "shape", "backend"),
        ("before", "spread", "now", "spread", "change", "MLX's", "verdict"),
        title="change: time before over time now, above 1 is faster now",
        caption=f"A verdict: medians {LEAST_CHANGE:.0%} apart, and rounds that chance would rank so in 1 of {1 / SIGNIFICANCE:.0f}"
        " runs at most. MLX's: its own change; it is the same code, so the machine's.",
    )
    lines = []
    for change in changes:
        before, now = change.before.ours, change.now.ours
        cells = [time_text(before.median), f"{before.spread:.0%}", time_text(now.median), f"{now.spread:.0%}"]
        color = _VERDICTS[change.verdict]
        cells += [f"{change.ratio:.2f}x", f"{change.baseline:.2f}x", f"[{color}]{change.verdict}[/{color}]"]
        lines.append((change.now, cells))
    return _in_groups(grid, lines)


def differences(before: Results, now: Results, common: int) -> Iterator[str]:
    """What else a reader of a comparison has to know."""
    for results, name in ((before, "before"), (now, "now")):
        if len(results.rows) > common:
            yield f"{len(results.rows) - common} rows are only in the run {name}"
    for fact in _MACHINE:
        if before.machine.get(fact) != now.machine.get(fact):
            yield f"[yellow]not the same {fact}[/yellow]: {before.machine.get(fact)} before, {now.machine.get(fact)} now"


def require_matplotlib() -> None:
    """``click.ClickException`` without it."""
    if find_spec("matplotlib") is None:
        raise click.ClickException('--plot needs matplotlib: pip install "mlx-anvil[plot]".')


def draw(results: Results, path: Path) -> None:
    """How many times faster than MLX, by row; a bar each dtype, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys((row.name, row.shape, row.backend) for row in results.rows))
    labels = [f"{name}\n{shape}, {backend}" for name, shape, backend in groups]
    figure, axis = plt.subplots(figsize=(9, 1.4 + 0.46 * len(groups)), layout="constrained")
    shown = [dtype for dtype in _COLORS if any(row.dtype == dtype for row in results.rows)]
    height = 0.8 / len(shown)
    for index, dtype in enumerate(shown):
        rows = [row for row in results.rows if row.dtype == dtype]
        places = [
            groups.index((row.name, row.shape, row.backend)) + (index - (len(shown) - 1) / 2) * height for row in rows
        ]
        # From 1 on, so that slower rows go to the left.
        bars = axis.barh(places, [row.speedup - 1 for row in rows], height, left=1, color=_COLORS[dtype], label=dtype)
        axis.bar_label(bars, labels=[f"{row.speedup:.3g}" for row in rows], fontsize=6, padding=2)
    axis.set_xscale("log")
    axis.margins(x=0.1, y=0.01)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(groups)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("times faster than MLX")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    facts = results.machine
    axis.set_title(f"{facts['cpu_model']}, {facts['threads']} threads, {facts['isa']}, MLX {facts['mlx']}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)

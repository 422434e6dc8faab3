"""Results as tables, and as a plot."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.text import Text

from mlx_anvil._cli import Columns, ratio_text, time_text
from mlx_anvil._extras import is_installed, need
from mlx_anvil.bench.compare import LEAST_CHANGE, SIGNIFICANCE, Change
from mlx_anvil.bench.results import Results, Row

_COLORS = {"float32": "#2f4b8f", "float16": "#e07a1f", "bfloat16": "#0b6e4f"}
_VERDICTS = {"faster": "green", "slower": "bold red", "same": "dim"}
_MACHINE = ("cpu_model", "threads", "isa", "mlx", "version")


def _add_rows(table: Columns, rows: Sequence[tuple[Row, list[str | Text]]]) -> Columns:
    """Rows that differ in dtype alone share a heading."""
    previous = None
    for row, cells in rows:
        title = f"{row.name}  {row.shape}  {row.backend}"
        if title != previous:
            table.heading(title)
        previous = title
        table.row(f"  {row.dtype}", *cells)
    return table


def table(results: Results) -> Columns:
    """One row per measurement."""
    lines: list[tuple[Row, list[str | Text]]] = []
    for row in results.rows:
        speedup = Text(ratio_text(row.speedup), style="green" if row.speedup >= 1 else "red")
        spreads = [f"{timing.spread:.0%}" for timing in (row.ours, row.mlx)]
        lines.append((row, [time_text(row.ours.median), spreads[0], time_text(row.mlx.median), spreads[1], speedup]))
    return _add_rows(Columns(("",), ("ours", "spread", "MLX", "spread", "speed-up")), lines)


TABLE_NOTE = (
    "Times are medians. spread: interquartile range as a fraction of the median. speed-up: time of MLX's over ours."
)


def comparison(changes: Sequence[Change]) -> Columns:
    """One row per measurement that both runs have."""
    lines: list[tuple[Row, list[str | Text]]] = []
    for change in changes:
        before, now = change.before.ours, change.now.ours
        times = [cell for timing in (before, now) for cell in (time_text(timing.median), f"{timing.spread:.0%}")]
        verdict = Text(change.verdict, style=_VERDICTS[change.verdict])
        lines.append((change.now, [*times, ratio_text(change.ratio), ratio_text(change.baseline), verdict]))
    heads = ("before", "spread", "now", "spread", "change", "MLX", "verdict")
    return _add_rows(Columns(("",), heads), lines)


COMPARISON_NOTE = (
    "change: time before over time now; above 1 is faster. MLX: the same ratio for MLX, which shows drift of the machine. "
    f"A verdict needs medians that differ by {LEAST_CHANGE:.0%} and a rank test at p < {SIGNIFICANCE:g}."
)


def differences(before: Results, now: Results, common: int) -> Iterator[str]:
    """What else differs between two runs: rows that only one of them has, and facts of the machine."""
    for results, name in ((before, "first"), (now, "second")):
        if only := len(results.rows) - common:
            yield f"{only} {'row is' if only == 1 else 'rows are'} only in the {name} file."
    for fact in _MACHINE:
        values = [str(results.machine.get(fact, "unknown")) for results in (before, now)]
        if values[0] != values[1]:
            yield f"The runs differ in {fact.replace('_', ' ')}: {values[0]} in the first, {values[1]} in the second."


def require_matplotlib() -> None:
    """Raises ``click.ClickException`` if matplotlib is not installed."""
    if not is_installed("matplotlib"):
        raise click.ClickException(need("--plot", "matplotlib"))


def draw(results: Results, path: Path) -> None:
    """Writes a PNG: the speed-up over MLX of every row, one bar per dtype, on a logarithmic axis. Error bars are the
    interquartile range of the rounds.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

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
        # Bars start at 1, so that those of slower rows point to the left.
        axis.barh(places, [row.speedup - 1 for row in rows], height, left=1, color=_COLORS[dtype], label=dtype)
        for place, row in zip(places, rows, strict=True):
            low, high = row.speedup_quartiles
            axis.plot([low, high], [place, place], color="black", linewidth=0.8, solid_capstyle="butt")
            axis.annotate(
                f"{row.speedup:.3g}", (max(high, 1), place), (3, 0),
                textcoords="offset points", fontsize=6, va="center",
            )  # fmt: skip
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.margins(x=0.1, y=0.01)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(groups)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("speed-up over MLX; lines: interquartile range of the rounds")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    facts = results.machine
    axis.set_title(f"{facts['cpu_model']}, {facts['threads']} threads, {facts['isa']}, MLX {facts['mlx']}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)

"""Measures the time and memory of attention, forward and backward, at growing lengths, for mlx-anvil and MLX.

  python examples/long_context.py
  python examples/long_context.py --longest 32768 --window 1024 --memory-limit 4

On the CPU, MLX's attention is a graph with matrices of length x length; on Metal, its gradient is. A curve therefore
stops before the length whose matrices would exceed the memory limit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import COLORS, DTYPES, MLX, OURS, check_heads, dtype_option, plot_option, save, size

import click
import mlx.core as mx
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import mlx_anvil

Attention = Callable[[mx.array, mx.array, mx.array], mx.array]


@dataclass
class Point:
    length: int
    seconds: float
    peak_bytes: int


@dataclass
class Curve:
    label: str
    points: list[Point]
    stopped: str = ""  # reason why the curve ends


def attentions(window: int | None, scale: float) -> dict[str, Attention]:
    """Returns our and MLX's version of the same function: causal, with ``window`` keys per query, its own included."""

    def ours(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mlx_anvil.flash_attention(q, k, v, scale=scale, mask="causal", window_size=window)

    def theirs(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        mask: Any = "causal"
        if window is not None:
            position = mx.arange(q.shape[2])
            behind = position[:, None] - position[None]
            mask = (behind >= 0) & (behind < window)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    return {OURS: ours, MLX: theirs}


def measured(attend: Attention, length: int, options: dict[str, Any]) -> Point:
    """Measures one call, forward and all three gradients. Memory includes the inputs and the gradients."""
    before = mx.get_active_memory()
    dtype = DTYPES[options["dtype"]]
    heads = (options["heads"], options["kv_heads"], options["kv_heads"])
    q, k, v = (mx.random.normal((1, count, length, options["head_dim"])).astype(dtype) for count in heads)
    gradients = mx.value_and_grad(lambda q, k, v: attend(q, k, v).astype(mx.float32).square().sum(), argnums=(0, 1, 2))
    mx.eval(q, k, v)
    mx.clear_cache()
    mx.reset_peak_memory()
    start = time.perf_counter()
    mx.eval(gradients(q, k, v))
    return Point(length, time.perf_counter() - start, mx.get_peak_memory() - before)


def grow(label: str, attend: Attention, lengths: list[int], options: dict[str, Any], console: Console) -> Curve:
    """Measures lengths until the memory predicted from the last two points would exceed the limit.

    Two shorter lengths come first, for the first prediction and to warm up. They are not part of the curve."""
    points: list[Point] = []
    stopped = ""
    limit = options["memory_limit"] * 2**30
    for length in [max(1, lengths[0] // 4), max(1, lengths[0] // 2), *lengths]:
        if len(points) >= 2:
            before, last = (point.peak_bytes for point in points[-2:])
            expected = last * last / before  # lengths double, so memory grows by a factor that approaches 2 or 4
            if expected > limit:
                stopped = f"length {length} would take {size(expected)}, above the limit of {size(limit)}"
                break
        with console.status(f"{label}, length {length}"):
            points.append(measured(attend, length, options))
    return Curve(label, points[2:], stopped)


def table_of(curves: list[Curve]) -> Table:
    table = Table("length", *(f"{curve.label}: {what}" for curve in curves for what in ("time", "memory")))
    for column in table.columns:
        column.justify = "right"
    for index, point in enumerate(max((curve.points for curve in curves), key=len)):
        cells: list[str] = []
        for curve in curves:
            here = curve.points[index] if index < len(curve.points) else None
            cells += [f"{here.seconds * 1e3:,.1f} ms", size(here.peak_bytes)] if here else ["", ""]
        table.add_row(str(point.length), *cells)
    return table


def draw(curves: list[Curve], title: str, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")  # a plain Figure needs no display
    panels = figure.subplots(1, 2)
    values: list[tuple[str, Callable[[Point], float]]] = [
        ("time of forward and backward, s", lambda point: point.seconds),
        ("peak memory, MiB", lambda point: point.peak_bytes / 2**20),
    ]
    for axis, (what, value) in zip(panels, values, strict=True):
        for curve in curves:
            lengths = [point.length for point in curve.points]
            axis.plot(
                lengths, [value(point) for point in curve.points], "o-", color=COLORS[curve.label], label=curve.label
            )
            if curve.stopped:
                axis.plot(lengths[-1], value(curve.points[-1]), "X", markersize=11, color=COLORS[curve.label])
        axis.set_xscale("log", base=2)
        longest = max((curve.points for curve in curves), key=len)
        axis.set_xticks([point.length for point in longest], [str(point.length) for point in longest])
        axis.set_yscale("log", base=10)
        axis.set(xlabel="length", ylabel=what)
        axis.grid(alpha=0.25)
    panels[0].legend(frameon=False)
    stops = [f"x {curve.label} stops: {curve.stopped}" for curve in curves if curve.stopped]
    figure.suptitle("\n".join([title, *stops]), fontsize=10)
    save(figure, path)


@click.command()
@click.option("--shortest", type=click.IntRange(1), default=512, show_default=True, help="First length.")
@click.option(
    "--longest", type=click.IntRange(1), default=16384, show_default=True, help="Last length; lengths double."
)
@click.option("--heads", type=click.IntRange(1), default=4, show_default=True)
@click.option("--kv-heads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--head-dim", type=click.IntRange(2), default=64, show_default=True)
@click.option("--window", type=click.IntRange(1), help="Keys per query, its own included. Default: all up to its own.")
@dtype_option("float32")
@click.option(
    "--memory-limit",
    type=click.FloatRange(0, min_open=True),
    default=0.5,
    show_default=True,
    help="Limit in GiB on the predicted memory of a run.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@plot_option("long_context.png")
def main(shortest: int, longest: int, window: int | None, seed: int, plot: Path, **options: Any) -> None:
    """Measures the time and memory of attention, forward and backward, at growing lengths."""
    if longest < shortest:
        raise click.UsageError(f"--longest {longest} is below --shortest {shortest}.")
    check_heads(options["heads"] * options["head_dim"], options["heads"], options["kv_heads"])
    mx.random.seed(seed)
    lengths = [shortest << doublings for doublings in range((longest // shortest).bit_length())]
    console = Console()
    functions = attentions(window, options["head_dim"] ** -0.5)
    curves = [grow(label, attend, lengths, options, console) for label, attend in functions.items()]
    console.print(table_of(curves))
    for curve in curves:
        if curve.stopped:
            console.print(f"{curve.label} stops: {curve.stopped}")
    heads = f"{options['heads']} heads of {options['head_dim']}, {options['kv_heads']} of keys and values"
    kind = "causal" if window is None else f"window of {window}"
    draw(curves, f"Attention, forward and backward: {heads}, {kind}, {options['dtype']}", plot)
    console.print(f"wrote {plot}")


if __name__ == "__main__":
    main()

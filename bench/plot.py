"""Everything that is published from bench/results, by one command:

    python bench/plot.py

draws the pictures beside the results, and writes the tables into the Markdown pages, between the lines
`<!-- table: NAME -->` and `<!-- end -->`. A test compares the tables with the results.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from harness import RESULTS, label_bars, plain_ticks

import click
import matplotlib.pyplot as plt

import agx_picture
import distributed_picture
from delta_pictures import gated_delta_lengths
from op_pictures import OP_PICTURES
from tables import ROOT, Results, pages, token_rates, with_tables

BANDWIDTH_COLORS = {
    "copy": "#b8b8b8", "ours": "#0b6e4f", "PyTorch": "#e07a1f", "MLX compiled": "#5b8fd6", "MLX": "#2f4b8f",
}  # fmt: skip
ATTENTION_COLORS = {"MLX": "#2f4b8f", "PyTorch": "#e07a1f", "ours": "#0b6e4f"}
PATCHED, IN_8_BITS = "MLX, patched", "MLX, patched, 8-bit activations"
MODEL_COLORS = {"MLX": "#2f4b8f", PATCHED: "#0b6e4f", IN_8_BITS: "#57b894", "llama.cpp": "#8d99ae"}


def title(what: str, machine: Results) -> str:
    return f"{what} on the CPU, {machine['cpu_model']}, {machine['threads']} threads, {machine['isa']}, MLX {machine['mlx']}"


def finish(figure: Any, axes: Any, path: Path) -> None:
    """One legend for all panels."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    options = {"loc": "outside lower center", "frameon": False, "fontsize": 9, "title_fontsize": 7}
    options["title"] = "lines on the bars: interquartile range of the rounds"
    figure.legend(unique.values(), unique.keys(), ncols=len(unique), **options)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def bandwidths(row: Results) -> dict[str, float]:
    """GB/s of every contestant: bytes that the op has to move, over its time."""
    seconds = row["seconds"]
    result = {name: row["bytes"] / seconds[name]["median"] / 1e9 for name in BANDWIDTH_COLORS if name in seconds}
    return result | {"copy": row["copy_gb_per_s"]}


def draw_silu_gate(results: Results, path: Path) -> None:
    """One panel per shape and direction, one group of bars per dtype."""
    rows = [row for row in results["rows"] if row["memory"] != "fresh"]
    panels = sorted({(tuple(row["shape"]), row["direction"]) for row in rows}, key=lambda p: (p[0], p[1] == "backward"))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.9), sharey=True, layout="constrained")
    for axis, (shape, direction) in zip(axes, panels, strict=True):
        chosen = [row for row in rows if tuple(row["shape"]) == shape and row["direction"] == direction]
        for group, row in enumerate(chosen):
            for index, (name, value) in enumerate(bandwidths(row).items()):
                place = group + (index - 2) * 0.17
                axis.bar(place, value, 0.16, color=BANDWIDTH_COLORS[name], label=name)
                label_bars(axis, [place], [value], [row["seconds"].get(name)])
        axis.set_title(f"{' x '.join(map(str, shape))}, {direction}", fontsize=10)
        axis.set_xticks(range(len(chosen)), [row["dtype"] for row in chosen])
    axes[0].set_ylabel("GB/s")
    figure.suptitle(title("silu_gate", results["machine"]), fontsize=11)
    finish(figure, axes, path)


def draw_attention(results: Results, path: Path) -> None:
    """One panel per shape and direction, with a causal mask."""
    panels = itertools.product(("8 heads of 64, 1024", "32/8 heads of 128, 2048"), ("forward", "forward + backward"))
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.9), sharey=True, layout="constrained")
    for axis, (problem, direction) in zip(axes, panels, strict=True):
        rows = [
            row
            for row in results["rows"]
            if row["mask"] == "causal" and (row["problem"], row["direction"]) == (problem, direction)
        ]
        for index, (name, color) in enumerate(ATTENTION_COLORS.items()):
            for group, row in enumerate(rows):
                speedup = 1.0 if name == "ours" else row["speedup"].get(name)
                if speedup is not None:
                    rate = float(row["rate"].split()[0]) / speedup
                    place = group + (index - 1) * 0.28
                    axis.bar(place, rate, 0.26, color=color, label=name)
                    label_bars(axis, [place], [rate], [row["seconds"].get(name)])
        axis.set_yscale("log")
        plain_ticks(axis.yaxis)
        axis.margins(y=0.1)
        axis.set_title(f"{problem}, {direction}", fontsize=9)
        axis.set_xticks(range(len(rows)), [row["dtype"] for row in rows])
    axes[0].set_ylabel("GFLOP/s")
    figure.suptitle(title("flash_attention, causal,", results["machine"]), fontsize=10)
    finish(figure, axes, path)


def draw_language_model(results: Results, path: Path) -> None:
    """A panel for decoding, one for prefill."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    for axis, what in zip(axes, ("decode", "prefill"), strict=True):
        of_bits = {
            bits: [row for row in results["rows"] if (row["op"], row["activation_bits"]) == (what, bits)]
            for bits in (None, 8)
        }
        for index, name in enumerate(MODEL_COLORS):
            rows = of_bits[8 if name == IN_8_BITS else None]
            rates = [token_rates(row)[PATCHED if name == IN_8_BITS else name] for row in rows]
            places = [group + (index - 1.5) * 0.22 for group in range(len(rows))]
            axis.bar(places, rates, 0.2, color=MODEL_COLORS[name], label=name)
            key = "ours" if name in (PATCHED, IN_8_BITS) else name
            label_bars(axis, places, rates, [row["seconds"].get(key) for row in rows])
        axis.set_yscale("log")
        plain_ticks(axis.yaxis)
        axis.margins(y=0.1)
        axis.set_title(what + (", 64 tokens" if what == "prefill" else ", one by one"), fontsize=10)
        axis.set_xticks(range(len(rows)), [row["dtype"] for row in rows])
    axes[0].set_ylabel("tokens a second")
    figure.suptitle(title("4-bit Llama, 0.8 billion weights,", results["machine"]), fontsize=10)
    finish(figure, axes, path)


def draw_parts(results: Results, path: Path) -> None:
    """One bar for each step: its parts side by side, as shares of it."""
    lines = results["rows"]
    names = [name for name, part in lines[0]["parts"].items() if part["by"]]
    figure, axis = plt.subplots(figsize=(10, 4.2), layout="constrained")
    places = [f"{line['op']}, {line['dtype']}\n{line['seconds']['step']['median'] * 1e3:.0f} ms" for line in lines]
    left = [0.0] * len(lines)
    for name, color in zip(names, plt.get_cmap("tab20").colors, strict=False):
        shares = [line["parts"][name]["median"] / line["seconds"]["step"]["median"] for line in lines]
        by = lines[0]["parts"][name]["by"]
        axis.barh(places, shares, left=left, color=color, label=name if by != "MLX" else f"{name} (MLX)")
        left = [a + b for a, b in zip(left, shares, strict=True)]
    for place, line in enumerate(lines):
        share = line["seconds"]["read"]["median"] / line["seconds"]["step"]["median"]
        axis.plot([share] * 2, [place - 0.4, place + 0.4], color="black", label="reading the weights")
    axis.invert_yaxis()
    axis.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    axis.set_xlabel("share of the time of the step")
    axis.spines[["top", "right"]].set_visible(False)
    handles, texts = axis.get_legend_handles_labels()
    unique = dict(zip(texts, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), ncols=4, loc="outside lower center", frameon=False, fontsize=8)
    figure.suptitle(title("Patched 4-bit Llama", results["machine"]), fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


PICTURES = {
    "silu_gate_cpu": draw_silu_gate,
    "flash_attention_cpu": draw_attention,
    "lm_cpu": draw_language_model,
    "lm_parts_cpu": draw_parts,
    "agx": agx_picture.draw,
    "gated_delta_lengths_cpu": gated_delta_lengths,
    "communication_cpu": distributed_picture.draw,
    **OP_PICTURES,
}


@click.command()
def main() -> None:
    """Draws every picture and renews every table."""
    for name, draw in PICTURES.items():
        draw(json.loads((RESULTS / f"{name}.json").read_text()), RESULTS / f"{name}.png")
        click.echo(f"drawn: bench/results/{name}.png")
    for page in pages():
        if (text := page.read_text()) != (renewed := with_tables(text)):
            page.write_text(renewed)
            click.echo(f"tables of: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

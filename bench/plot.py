"""Draws the bar chart of a result file and prints its table for the README:

    python bench/plot.py silu_gate_cpu

makes bench/results/silu_gate_cpu.png; ``flash_attention_cpu`` has a table only.
"""

import json
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from harness import RESULTS

COLORS = {"copy": "#b8b8b8", "ours": "#0b6e4f", "PyTorch": "#e07a1f", "MLX compiled": "#5b8fd6", "MLX": "#2f4b8f"}


def bandwidths(row: dict) -> dict[str, float]:
    """GB/s of every contestant: bytes that the op has to move, over its time."""
    seconds = row["seconds"]
    result = {label: row["bytes"] / seconds[label]["median"] / 1e9 for label in COLORS if label in seconds}
    return result | {"copy": row["copy_gb_per_s"]}


def draw(results: dict, path: Path) -> None:
    """One panel per shape and direction, one group of bars per dtype."""
    rows = [row for row in results["rows"] if row.get("memory") != "fresh"]
    panels = sorted({(tuple(row["shape"]), row["direction"]) for row in rows}, key=lambda p: (p[0], p[1] == "backward"))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.9), sharey=True, layout="constrained")
    for axis, (shape, direction) in zip(axes, panels, strict=True):
        chosen = [row for row in rows if tuple(row["shape"]) == shape and row["direction"] == direction]
        for group, row in enumerate(chosen):
            for index, (label, value) in enumerate(bandwidths(row).items()):
                bar = axis.bar(group + (index - 2) * 0.17, value, 0.16, color=COLORS[label], label=label)
                text = f"{value:.0f}" if value >= 10 else f"{value:.1f}"
                axis.bar_label(bar, labels=[text], fontsize=7, padding=1)
        axis.set_title(f"{' x '.join(map(str, shape))}, {direction}", fontsize=10)
        axis.set_xticks(range(len(chosen)), [row["dtype"] for row in chosen])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("GB/s")
    handles, labels = axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(), unique.keys(), ncols=len(unique), loc="outside lower center", frameon=False, fontsize=9
    )
    machine = results["machine"]
    title = f"{rows[0]['op']} on the CPU, {machine['cpu_model']}, {machine['threads']} threads, {machine['isa']}, MLX {machine['mlx']}"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)


def attention_markdown(results: dict) -> str:
    """The README's table of flash_attention: forward, gradients and decoding."""
    lines = [
        "| heads, lengths | | mask | dtype | ours | rate | over PyTorch | over MLX |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        if "rate" not in row or row["direction"] == "decode, cached":
            continue
        speedup = row["speedup"]
        over_torch = min((speedup[x] for x in ("PyTorch", "PyTorch repeated") if x in speedup), default=None)
        rate = row["rate"]
        if row["direction"] == "decode":
            rate += f", {row['share_of_limit']:.2f} of reading"
        cells = [row["problem"], row["direction"], row["mask"], row["dtype"]]
        ms = row["seconds"]["ours"]["median"] * 1e3
        cells += [f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms", rate]
        cells.append("" if over_torch is None else f"{over_torch:.2f}x")
        cells.append(f"{speedup['MLX']:.0f}x" if "MLX" in speedup else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def silu_gate_markdown(results: dict) -> str:
    """The README's table: rows that reuse memory, as a training loop does."""
    lines = [
        "| shape | direction | dtype | ours | share of copy | over MLX | over MLX compiled | over PyTorch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        if row.get("memory") == "fresh":
            continue
        ours = row["seconds"]["ours"]["median"] * 1e3
        faster = [
            f"{row['speedup'][label]:.1f}x" if label in row["speedup"] else ""
            for label in ("MLX", "MLX compiled", "PyTorch")
        ]
        shape = " x ".join(map(str, row["shape"]))
        cells = [
            shape,
            row["direction"],
            row["dtype"],
            f"{ours:.2f} ms, {row['gb_per_s']} GB/s",
            f"{row['share_of_copy']:.2f}",
            *faster,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@click.command()
@click.argument("name")
def main(name: str) -> None:
    """Prints the README's table of bench/results/NAME.json, and draws NAME.png."""
    results = json.loads((RESULTS / f"{name}.json").read_text())
    if name == "flash_attention_cpu":
        print(attention_markdown(results))
    else:
        draw(results, RESULTS / f"{name}.png")
        print(silu_gate_markdown(results))


if __name__ == "__main__":
    main()

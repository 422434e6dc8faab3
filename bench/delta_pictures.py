"""The picture of time and memory of gated_delta by length; ``plot.py`` draws it with the others."""

from pathlib import Path
from typing import Any

from harness import plain_ticks

import matplotlib.pyplot as plt

Results = dict[str, Any]
NAMES = {"ours": ("mlx-anvil", "#0b6e4f"), "mlx-lm": ("graph of mlx-lm", "#2f4b8f")}
GIB = 2**30


def _memory(count: float) -> str:
    return f"{count / GIB:.2g} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def gated_delta_lengths(results: Results, path: Path) -> None:
    """Both axes logarithmic, with the line of proportional growth through the longest length."""
    rows = results["rows"]
    panels = (
        ("forward + backward, s", lambda row, label: row["seconds"].get(label, {}).get("median"), _time),
        ("peak memory beyond the arguments, MiB", lambda row, label: row["peak_bytes"].get(label), _memory),
    )
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, (what, value, text) in zip(axes, panels, strict=True):
        unit = 2**20 if "MiB" in what else 1
        for label, (name, color) in NAMES.items():
            points = [(row["shape"][0], found) for row in rows if (found := value(row, label)) is not None]
            if not points:
                continue
            lengths, values = zip(*points, strict=True)
            axis.plot(lengths, [x / unit for x in values], "o-", color=color, label=name)
            for place in {points[0], points[-1]}:
                at = (place[0], place[1] / unit)
                axis.annotate(text(place[1]), at, (0, 6), textcoords="offset points", ha="center", fontsize=8)
            if label == "ours":
                line = [values[-1] * length / lengths[-1] / unit for length in lengths]
                axis.plot(lengths, line, ":", color="gray", linewidth=1, zorder=0, label="proportional to the length")
        steps = [row["shape"][0] for row in rows]
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(steps, [str(s) if s < 1024 else f"{s // 1024}k" for s in steps])
        plain_ticks(axis.yaxis)
        axis.margins(x=0.08, y=0.12)
        axis.set(xlabel="steps", ylabel=what)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda index: names[index].startswith("proportional"))
    handles, names = [handles[i] for i in order], [names[i] for i in order]
    figure.legend(handles, names, ncols=len(names), loc="outside lower center", frameon=False, fontsize=9)
    machine = results["machine"]
    processor = machine["cpu_model"].replace("(R)", "").replace(" Processor", "")
    layer = f"gated_delta, 16 heads of k, 32 of v, of 128, {rows[0]['dtype']}"
    figure.suptitle(f"{layer} ({processor}, {machine['threads']} threads, MLX {machine['mlx']})", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)

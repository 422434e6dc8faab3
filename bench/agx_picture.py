"""The picture of agx.json, for docs/apple-kernels.md."""

from pathlib import Path

import matplotlib.pyplot as plt

from agx_tables import DTYPE, compared
from op_tables import Results

COLORS = {"MLX": "#2f4b8f", "ours": "#0b6e4f"}
PANELS = {"instructions": "instructions", "registers": "registers (16-bit halves)", "threads": "threads that fit"}


def draw(results: Results, path: Path) -> None:
    """A panel for each count, a pair of bars for each kernel."""
    rows = list(compared(results))
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 0.33 * len(rows) + 1), sharey=True, layout="constrained")
    for axis, (name, heading) in zip(axes, PANELS.items(), strict=True):
        for index, (who, color) in enumerate(COLORS.items()):
            values = [row["mlx" if who == "MLX" else "ours"][name] for row in rows]
            places = [place + (index - 0.5) * 0.4 for place in range(len(rows))]
            bars = axis.barh(places, values, 0.38, color=color, label=who)
            axis.bar_label(bars, fontsize=7, padding=2)
        axis.set_title(heading, fontsize=10)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row["what"] for row in rows], fontsize=9)
    axes[0].invert_yaxis()
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, ncols=2, loc="outside lower center", frameon=False, fontsize=9)
    versions = f"MLX {results['machine']['mlx']}"
    figure.suptitle(f"{DTYPE} kernels as code for an M1 by Mesa's compiler, not run ({versions})", fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)

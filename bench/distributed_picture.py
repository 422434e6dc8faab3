"""The picture of docs/distributed.md: predicted speed-ups by the number of machines."""

from pathlib import Path

from harness import plain_ticks

import matplotlib.pyplot as plt

from distributed_public import LINKS
from distributed_tables import COUNTS, PAYS, SCHEMES
from op_tables import Results

MARKERS = "osD^vP"


def draw(_: Results, path: Path) -> None:
    """A panel for each link; bands show the slow and the fast link."""
    figure, axes = plt.subplots(1, len(LINKS), figsize=(11, 4.4), sharey=True, layout="constrained")
    ends = (1, *COUNTS)
    for axis, link in zip(axes, LINKS, strict=True):
        axis.plot(ends, ends, ":", color="black", linewidth=1, label="ideal")
        axis.fill_between(ends, [1e-3] * len(ends), [PAYS * n for n in ends], color="#f0f0f0", label="below half of it")
        drawn = [scheme for scheme in SCHEMES if scheme.color]
        for scheme, marker in zip(drawn, MARKERS, strict=True):
            points = {n: value for n in COUNTS if (value := scheme.speedup(link, n)) is not None}
            low, high = ([scheme.speedup(link, n, which) for n in points] for which in ("slow", "fast"))
            axis.fill_between(list(points), low, high, color=scheme.color, alpha=0.15, linewidth=0)
            line = {"color": scheme.color, "label": scheme.name, "markersize": 4, "linewidth": 1.4}
            axis.plot([1, *points], [1, *points.values()], f"{marker}-", **line)
        axis.set_title(f"{link.name}, {link.machine}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(ends, map(str, ends))
        plain_ticks(axis.yaxis)
        axis.set(xlabel="machines", xlim=(0.93, 70), ylim=(0.2, 80))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("times one machine")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, ncols=4, loc="outside lower center", frameon=False, fontsize=9)
    figure.suptitle("Predicted, not measured", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)

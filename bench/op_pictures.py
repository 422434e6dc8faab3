"""Pictures of the pages of single ops; ``plot.py`` draws them with the others."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import label_bars, plain_ticks

import matplotlib.pyplot as plt

Results = dict[str, Any]
Bar = tuple[float, Any]  # its height, and the timing that it comes from
Panel = Mapping[str, Mapping[str, Bar]]  # by group and then by name
COLORS = ("#0b6e4f", "#5b8fd6", "#e07a1f", "#8d99ae", "#2f4b8f")


def _figure(
    path: Path, results: Results, what: str, unit: str, panels: Mapping[str, Panel], *, log: bool = False
) -> None:
    """Grouped bars, a panel for each entry, with one legend below. A line marks 1 where the bars are ratios."""
    width = sum(max(3.2, 1.3 * len(panel)) for panel in panels.values())
    ratios = [len(panel) for panel in panels.values()]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(width, 3.8), sharey=True, squeeze=False, width_ratios=ratios, layout="constrained"
    )
    for axis, (heading, panel) in zip(axes[0], panels.items(), strict=True):
        names = list(dict.fromkeys(name for bars in panel.values() for name in bars))
        step = 0.84 / len(names)
        for index, name in enumerate(names):
            found = [(group, bars[name]) for group, bars in enumerate(panel.values()) if name in bars]
            places = [group + (index - (len(names) - 1) / 2) * step for group, _ in found]
            heights = [height for _, (height, _) in found]
            axis.bar(places, heights, step * 0.94, color=COLORS[index], label=name)
            label_bars(axis, places, heights, [timing for _, (_, timing) in found], digits=3)
        axis.set_xticks(range(len(panel)), list(panel), fontsize=9)
        axis.set_title(heading, fontsize=10)
        axis.margins(y=0.1)
        axis.spines[["top", "right"]].set_visible(False)
        if log:
            axis.set_yscale("log")
            plain_ticks(axis.yaxis)
        if "GB/s" not in unit:
            axis.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    axes[0][0].set_ylabel(unit)
    handles, names = axes[0][0].get_legend_handles_labels()
    options = {"ncols": len(names), "loc": "outside lower center", "frameon": False, "fontsize": 9, "title_fontsize": 7}
    figure.legend(handles, names, title="lines on the bars: interquartile range of our times", **options)
    machine = results["machine"]
    processor = machine["cpu_model"].replace("(R)", "").replace(" Processor", "")
    figure.suptitle(f"{what} ({processor}, {machine['threads']} threads, MLX {machine['mlx']})", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _inverse(timing: Any) -> Any:
    """The timing as ``label_bars`` needs it for bars that show times."""
    if timing is None:
        return None
    median = timing["median"]
    return {"median": median, "low": median**2 / timing["low"], "high": median**2 / timing["high"]}


def norm(results: Results, path: Path) -> None:
    """Shares of the copy bandwidth."""
    groups: dict[str, dict[str, Bar]] = {}
    for row in results["rows"]:
        if row["shape"] == [2048, 4096]:
            groups.setdefault(row["op"].replace(", ", "\n"), {})[row["dtype"]] = (
                row["share_of_copy"],
                row["seconds"].get("ours"),
            )
    _figure(path, results, "Norms, 2048 x 4096", "share of the copy bandwidth", {"": groups})


def rope(results: Results, path: Path) -> None:
    """rope_qk beside two calls of mx.fast.rope, by length."""
    groups: dict[str, dict[str, Bar]] = {}
    for row in results["rows"]:
        batch, heads, _, length, _ = row["shape"]
        if (batch, heads, row["order"]) == (1, 32, "halves"):
            groups.setdefault(f"length {length}", {})[row["dtype"]] = (
                row["speedup"]["rope_qk"],
                row["seconds"]["rope_qk"],
            )
    _figure(path, results, "rope_qk, 32 heads of q, 8 of k", "speed relative to MLX", {"": groups}, log=True)


def quantized_matmul(results: Results, path: Path) -> None:
    """One row: bytes a second of every contestant."""
    names = {"ours": "mlx-anvil", "read": "plain read", "PyTorch int4": "PyTorch int4", "MLX": "MLX"}
    panels: dict[str, dict[str, dict[str, Bar]]] = {}
    for row in results["rows"]:
        if row["op"] == "decode":
            ours = row["bytes"] / row["seconds"]["ours"]["median"] / 1e9
            rates = {names[name]: (ours / row["speedup"].get(name, 1.0), row["seconds"].get(name)) for name in names}
            shape = f"{row['shape'][1]} x {row['shape'][2]}"
            panels.setdefault(shape, {})[row["dtype"]] = rates
    _figure(path, results, "quantized_matmul, one row, 4 bits", "GB/s of weights", panels, log=True)


def quantized_embedding(results: Results, path: Path) -> None:
    """One call, and a call in a graph."""
    panels: dict[str, dict[str, dict[str, Bar]]] = {"one call": {}, "in a graph of 64": {}}
    for row in results["rows"]:
        given = row["format"]
        name = f"{given['bits']} bits" if given["mode"] == "affine" else given["mode"]
        for panel, key in zip(panels.values(), ("speedup", "speedup_in_a_graph"), strict=True):
            panel.setdefault(f"{row['ids']} id{'s' if row['ids'] > 1 else ''}", {})[name] = (
                row[key],
                row["seconds"]["ours"] if key == "speedup" else None,
            )
    _figure(path, results, "quantized_embedding", "speed relative to MLX", panels, log=True)


def quantized_head(results: Results, path: Path) -> None:
    """Times relative to the product alone."""
    panels: dict[str, dict[str, dict[str, Bar]]] = {}
    for row in results["rows"]:
        heading = f"{row['rows']} row{'s' if row['rows'] > 1 else ''}"
        panels.setdefault(heading, {})[row["dtype"]] = {
            # Times, not rates: the ends of the line change places.
            name: (round(ratio, 2), _inverse(row["seconds"].get(name)))
            for name, ratio in row["over_product"].items()
        }
    _figure(path, results, "Output head, 128256 x 4096, 4 bits", "time relative to the product", panels)


def softmax_topk(results: Results, path: Path) -> None:
    """By rows and experts, k of 8, float32."""
    panels: dict[str, dict[str, dict[str, Bar]]] = {}
    for row in results["rows"]:
        count, experts = row["shape"]
        if (row["k"], row["dtype"], row.get("router", "softmax")) == (8, "float32", "softmax"):
            group = panels.setdefault(f"{count} row{'s' if count > 1 else ''}", {}).setdefault(f"{experts} experts", {})
            group[row["direction"]] = (row["speedup"]["MLX"], row["seconds"]["ours"])
    what = "softmax_topk, k = 8, float32"
    _figure(path, results, what, "speed relative to MLX", panels, log=True)


def quantized_experts(results: Results, path: Path) -> None:
    """By tokens, where MLX's time is known."""
    panels: dict[str, dict[str, dict[str, Bar]]] = {}
    for row in results["rows"]:
        if "MLX" in row["speedup"]:
            tokens = row["shape"][0]
            group = panels.setdefault(row["direction"], {}).setdefault(f"{tokens} token{'s' * (tokens > 1)}", {})
            group[row["dtype"]] = (row["speedup"]["MLX"], row["seconds"]["ours"])
    what = "quantized_experts, 8 of 128 experts of 768 x 2048, 4 bits"
    _figure(path, results, what, "speed relative to MLX", panels, log=True)


# By the file of results: what draws the picture of that name.
OP_PICTURES: dict[str, Callable[[Results, Path], None]] = {
    "norm_xeon": norm,
    "rope_xeon": rope,
    "quantized_matmul_cpu": quantized_matmul,
    "quantized_embedding_xeon": quantized_embedding,
    "quantized_head_cpu": quantized_head,
    "softmax_topk_cpu": softmax_topk,
    "quantized_experts_cpu": quantized_experts,
}

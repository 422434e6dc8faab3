"""The tables of docs/apple-kernels.md, of apple.json and apple_recurrences.json."""

from collections.abc import Sequence
from typing import Any

from op_tables import Results, markdown

SHOWN = ("M1", "M2 Pro", "M3 Max", "M4 Max")
NAMES = {
    "attention": "attention",
    "backward": "its gradients",
    "product": "product, 4 bits",
    "head": "head",
}


def _name(row: Results) -> str:
    dtype = "" if row["dtype"] == "float16" else f", {row['dtype']}"
    op = NAMES.get(row["op"], f"`{row['op']}`" if "_" in row["op"] else row["op"])
    return f"{op}, {row['what']}{dtype}"


def _launches_of(row: Results, chip: str) -> Sequence[dict[str, Any]]:
    return next(variant["launches"] for variant in row["mlx"] if chip in variant["chips"])


def _ours(row: Results, chip: str) -> Sequence[dict[str, Any]]:
    return next((v["launches"] for v in row.get("ours elsewhere", []) if chip in v["chips"]), row["ours"])


def _longest(row: Results, chip: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the launches of either side the one that takes longest."""
    times = next(e for e in row["estimates"] if e["chip"] == chip)
    return _ours(row, chip)[times["ours"]["longest"]], _launches_of(row, chip)[times["mlx"]["longest"]]


def _figure(needs: dict[str, Any], name: str) -> str:
    return f"{needs[name]:,}" if name in needs else "?"


def _megabytes(launches: Sequence[dict[str, Any]]) -> str:
    total = sum(launch["bytes"] for launch in launches) / 1e6
    return f"{total:,.0f}" if total >= 100 else f"{total:.3g}"


def code(results: Results) -> str:
    """Machine code of the longest launch and bytes of all, ours / MLX's; a line for MLX's other kernels of newer chips."""
    lines = []
    for row in results["rows"]:
        kernels: dict[str, None] = {}
        for chip in SHOWN:
            ours, mlx = _longest(row, chip)
            name = mlx["kernel"]
            if name in kernels:
                continue
            label = _name(row) if not kernels else f"the same, MLX on an {chip}"
            kernels[name] = None
            cells = [
                f"{_figure(ours, n)} / {_figure(mlx, n)}" for n in ("instructions", "registers", "spills", "threads")
            ]
            lines.append(
                [label, *cells, f"{_megabytes(_ours(row, chip))} / {_megabytes(_launches_of(row, chip))}", f"`{name}`"]
            )
    heads = ("ours / MLX's", "instructions", "registers", "spills", "threads", "MB", "MLX's kernel")
    return markdown(heads, lines)


def _time(microseconds: float) -> str:
    return f"{microseconds:.3g} us" if microseconds < 1e3 else f"{microseconds / 1e3:.3g} ms"


def _ratio(estimate: Results) -> float:
    return estimate["ours"]["microseconds"] / estimate["mlx"]["microseconds"]


def estimates(results: Results) -> str:
    """Ours / MLX's on two chips, and the least and the largest ratio of all chips."""
    lines = []
    for row in results["rows"]:
        found = {e["chip"]: e for e in row["estimates"]}
        cells = []
        for chip in (SHOWN[0], SHOWN[-1]):
            times = [found[chip][who]["microseconds"] for who in ("ours", "mlx")]
            cells.append(f"{_time(times[0])} / {_time(times[1])}")
        for estimate in (min(row["estimates"], key=_ratio), max(row["estimates"], key=_ratio)):
            ratio = f"{_ratio(estimate):.2f}"
            ratio = f"**{ratio}**" if _ratio(estimate) > 1.005 else ratio
            cells.append(f"{ratio}, {estimate['chip']}, {estimate['error']:.0%}")
        lines.append([_name(row), *cells, found[SHOWN[0]]["ours"]["bound"]])
    shown = [f"{chip}, {{}}" for chip in (SHOWN[0], SHOWN[-1])]
    errors = {e["chip"]: e["error"] for e in results["rows"][0]["estimates"]}
    heads = [s.format(f"{errors[c]:.0%}") for s, c in zip(shown, (SHOWN[0], SHOWN[-1]), strict=True)]
    return markdown(("ours / MLX's", *heads, "best ratio", "worst ratio", "ours on an M1: bound by"), lines)


def recurrences(results: Results) -> str:
    """What all launches of a call issue and move, and what the kernel needs that issues most: ours / a peer's."""
    lines = []
    for row in results["rows"]:
        ours = row["ours"]
        for who, peer in row["peers"].items():
            issued = " / ".join(_count(side["issued"]) for side in (ours, peer))
            ratios = (f"{ours[name] / peer[name]:.2f}" for name in ("issued", "cycles"))
            megabytes = " / ".join(_megabytes(side["launches"]) for side in (ours, peer))
            needs = [f"{ours[name]:,} / {peer[name]:,}" for name in ("registers", "spills", "threads")]
            launches = f"{len(ours['launches'])} / {len(peer['launches'])}"
            lines.append([f"`{row['op']}`, {row['what']}", who, issued, *ratios, megabytes, *needs, launches])
    heads = ("ours / theirs", "beside", "instructions", "ratio", "of cycles", "MB", "registers", "spills", "threads")
    return markdown((*heads, "launches"), lines)


def _count(number: float) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1e6 else f"{number / 1e3:.3g} K"

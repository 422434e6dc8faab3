"""Tables of the pages on mixtures of experts: gathered products, their two ends, and the whole block."""

from collections.abc import Iterable
from typing import Any

from op_tables import Results, markdown

WIDTH = ("float32", "bfloat16")


def milliseconds(row: Results) -> str:
    """Our time."""
    ms = row["seconds"]["ours"]["median"] * 1e3
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def times(value: float | None) -> str:
    """A ratio of times."""
    return "" if value is None else f"{value:.0f}x" if value >= 20 else f"{value:.2g}x"


def share(value: float | None) -> str:
    """A ratio near 1."""
    return "" if value is None else f"{value:.2f}"


def _format(row: Results) -> str:
    given = row.get("format")
    return "dense" if given is None else given["mode"] if given["mode"] != "affine" else f"{given['bits']} bits"


def _by_dtype(rows: Iterable[Results], key: tuple[str, ...]) -> dict[tuple[Any, ...], dict[str, Results]]:
    groups: dict[tuple[Any, ...], dict[str, Results]] = {}
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        groups.setdefault((*(row[k] for k in key), shape, _format(row)), {})[row["dtype"]] = row
    return groups


def gather_matmul(results: Results) -> str:
    """Ours in milliseconds, and beside what each row is measured against."""
    lines = []
    for (op, shape, form), rows in _by_dtype(results["rows"], ("op",)).items():
        for dtype in WIDTH:
            speedup = rows[dtype]["speedup"]
            cells = [share(speedup.get(name)) for name in ("read", "dense", "two products and a gate")]
            others = [times(speedup.get(name)) for name in ("MLX", "PyTorch")]
            lines.append([f"{op}, {shape}, {form}", dtype, milliseconds(rows[dtype]), *cells, *others])
    heads = ("experts", "dtype", "ours", "speed of a read", "of our dense product", "of two products and a gate")
    return markdown((*heads, "vs MLX", "vs PyTorch"), lines)


def moe(results: Results) -> str:
    """Speed relative to the graphs of mlx-lm, as written and compiled."""
    lines = []
    for row in results["rows"]:
        beside = [times(row["speedup"].get(name)) for name in ("MLX", "MLX compiled")]
        what = row["op"] if row["kind"] == "permute" else f"{row['op']}, {row['kind']}"
        lines.append([what, row["direction"], row["dtype"], str(row["tokens"]), milliseconds(row), *beside])
    return markdown(("", "direction", "dtype", "tokens", "ours", "vs MLX", "vs MLX compiled"), lines)


def quantized_experts(results: Results) -> str:
    """By tokens: speed relative to others, and of what bounds it. PyTorch's fastest block is the one that counts."""
    lines = []
    for row in results["rows"]:
        speedup = row["speedup"]
        torch = [value for name, value in speedup.items() if name.startswith("PyTorch")]
        beside = (speedup.get("MLX"), min(torch, default=None), speedup.get("llama.cpp"))
        cells = [row["direction"], row["dtype"], str(row["shape"][0]), milliseconds(row)]
        shares = (row["share_of_copy"], row["share_of_dense"])
        lines.append([*cells, *map(times, beside), *map(share, shares)])
    heads = ("", "dtype", "tokens", "ours", "vs MLX", "vs PyTorch", "vs llama.cpp", "share of copy")
    return markdown((*heads, "of our dense product"), lines)

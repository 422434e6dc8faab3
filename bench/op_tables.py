"""Tables of the pages of single ops; ``tables.py`` has the others."""

from collections.abc import Callable, Iterable
from typing import Any

Results = dict[str, Any]
DTYPES = ("float32", "float16", "bfloat16")


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Rows of cells as a table."""
    heads = list(heads)
    lines = ["| " + " | ".join(line) + " |" for line in (heads, *rows)]
    lines.insert(1, "|---" * len(heads) + "|")
    return "\n".join(lines).replace("|  |", "| |")


def _ratio(value: float) -> str:
    """Two digits after the point below 10, none above."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _by_dtype(label: str, rows: dict[str, Results], name: str, *, as_time: bool = False) -> list[str]:
    """The ratio to one contestant in each dtype: of speeds, or of times."""
    ratios = (rows[dtype]["speedup"][name] for dtype in DTYPES)
    return [label, *(_ratio(1 / ratio if as_time else ratio) for ratio in ratios)]


def norm(results: Results) -> str:
    """Shares of copy at two sizes, and the speed relative to MLX."""
    found = {(row["op"], row["dtype"], tuple(row["shape"])): row for row in results["rows"]}
    small, large = (512, 4096), (2048, 4096)
    rows = []
    for op in dict.fromkeys(row["op"] for row in results["rows"]):
        name, comma, variant = op.partition(",")
        for dtype in DTYPES:
            medium = found[op, dtype, small]
            shares = (f"{row['share_of_copy']:.2f}" for row in (found[op, dtype, large], medium))
            rows.append([f"`{name}`{comma}{variant}", dtype, *shares, f"{medium['speedup_over_mlx']:.0f}x"])
    shares_of_copy = ("share of copy, 2048 x 4096", "share of copy, 512 x 4096")
    return markdown(("", "dtype", *shares_of_copy, "vs MLX, 512 x 4096"), rows)


def rope(results: Results) -> str:
    """q with 32 heads and k with 8, by length."""
    rows: dict[tuple[int, str], dict[str, str]] = {}
    for row in results["rows"]:
        batch, heads, _, length, _ = row["shape"]
        if (batch, heads) != (1, 32):
            continue
        cells = rows.setdefault((length, row["dtype"]), {})
        if row["order"] == "halves":
            cells["vs MLX"] = f"{row['speedup']['rope_qk']:.3g}x"
            if "speedup_in_a_graph" in row:
                cells["in a graph"] = f"{row['speedup_in_a_graph']:.3g}x"
        if "share_of_copy" in row:
            cells[row["order"]] = f"{row['share_of_copy']:.2f}"
    names = ("vs MLX", "in a graph", "halves", "traditional")
    lines = ([str(length), dtype, *(cells.get(n, "") for n in names)] for (length, dtype), cells in rows.items())
    shares_of_copy = ("share of copy", "share of copy, `traditional=True`")
    return markdown(("length", "dtype", "vs MLX", "vs MLX, in a graph", *shares_of_copy), lines)


def quantized_matmul(results: Results) -> str:
    """Ratios of 4-bit products: decoding, a prompt, gradients and the gate."""
    groups: dict[tuple[str, int, str], dict[str, Results]] = {}
    for row in results["rows"]:
        if row["op"] != "format":
            count, n, k = row["shape"]
            groups.setdefault((row["op"], count, f"{n} x {k}"), {})[row["dtype"]] = row
    rows = []
    for (op, count, shape), group in groups.items():
        what = f"{count} row{'s' if count > 1 else ''}, {shape}"
        if op == "decode":
            rows += [
                _by_dtype(f"{what}: share of the read bandwidth", group, "read"),
                _by_dtype(f"{what}: speed relative to MLX", group, "MLX"),
                _by_dtype(f"{what}: speed relative to PyTorch's int4 product", group, "PyTorch int4"),
                _by_dtype(f"8 rows, {shape}: time relative to 1 row", group, "ours, 8 rows"),
            ]
        elif op == "prefill":
            rows.append(_by_dtype(f"{what}: speed relative to PyTorch's float32 GEMM", group, "PyTorch float32"))
        elif op == "gradient":
            label = f"gradient in `x`, {what}: time relative to the forward pass"
            rows.append(_by_dtype(label, group, "forward", as_time=True))
        else:
            label = f"`quantized_swiglu`, {what}: time relative to two products and `silu_gate`"
            rows.append(_by_dtype(label, group, "in steps", as_time=True))
    return markdown(("4 bits, groups of 64", *DTYPES), rows)


def quantized_gradients(results: Results) -> str:
    """Speed relative to MLX for each number of rows, from the slowest dtype to the fastest."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in results["rows"]:
        of_rows = found.setdefault((row["op"], row["format"]), {})
        of_rows.setdefault(row["shape"][0], []).append(row["speedup"]["MLX"])
    counts = sorted({row["shape"][0] for row in results["rows"]})
    lines = (
        [f"{what}; {format}", *(f"{_ratio(min(v[n]))}x to {_ratio(max(v[n]))}x" for n in counts)]
        for (what, format), v in sorted(found.items())
    )
    return markdown(("gradient in", *(f"{count} row{'s' if count > 1 else ''}" for count in counts)), lines)


def quantized_embedding(results: Results) -> str:
    """Speed relative to MLX: one call, and in a graph of many."""
    formats: dict[str, None] = {}
    rows: dict[int, list[str]] = {}
    for row in results["rows"]:
        given = row["format"]
        formats[f"{given['bits']} bits" if given["mode"] == "affine" else given["mode"]] = None
        rows.setdefault(row["ids"], []).append(f"{row['speedup']:.0f}x, {row['speedup_in_a_graph']:.0f}x")
    return markdown(("ids", *formats), ([str(ids), *cells] for ids, cells in rows.items()))


def quantized_head(results: Results) -> str:
    """Times relative to the product alone."""
    names = ("argmax", "top 40", "top 256")
    rows = (
        [row["dtype"], str(row["rows"]), *(f"{row['over_product'][n]:.2f}" for n in names)] for row in results["rows"]
    )
    return markdown(("dtype", "rows of `x`", *names), rows)


def mla_decode(results: Results) -> str:
    """Decodes over the longer cache, beside mlx-lm's graph and attention over joined keys."""
    rows = [row for row in results["rows"] if row["direction"] == "forward"]
    longest = max(row["shape"][-1] for row in rows)
    lines = []
    for row in rows:
        *_, heads, queries, keys = row["shape"]
        if keys != longest:
            continue
        seconds, speedup = row["seconds"]["ours"]["median"], row["speedup"]
        cells = [row["model"], str(heads), str(queries), row["dtype"], f"{1e3 * seconds:.3g} ms"]
        lines.append([*cells, *(f"{speedup[name]:.3g}x" for name in ("mlx-lm", "joined"))])
    return markdown(("heads of", "heads", "queries", "dtype", "ours", "vs mlx-lm", "vs joined"), lines)


def softmax_topk(results: Results) -> str:
    """The range over experts, k and dtypes, by the router and the number of rows."""
    found: dict[tuple[str, int], dict[tuple[str, str], list[float]]] = {}
    for row in results["rows"]:
        case = row.get("router", "softmax"), row["shape"][0]
        for base, value in row["speedup"].items():
            found.setdefault(case, {}).setdefault((base, row["direction"]), []).append(value)
    keys = [(base, direction) for base in ("MLX", "MLX compiled") for direction in ("forward", "forward + backward")]
    rows = (
        [str(count) if router == "softmax" else f"{count}, {router}"]
        + [f"{min(v[k]):.1f}x to {max(v[k]):.1f}x" for k in keys]
        for (router, count), v in found.items()
    )
    return markdown(("rows", *(f"vs {base}, {direction}" for base, direction in keys)), rows)


def both_ways(*rivals: str) -> Callable[[Results], str]:
    """Rows with a shape and a direction, beside these contestants."""

    def table(results: Results) -> str:
        rows = []
        for row in results["rows"]:
            shape = " x ".join(map(str, row["shape"]))
            others = [f"{_ratio(row['speedup'][name])}x" if name in row["speedup"] else "" for name in rivals]
            ours = f"{row['seconds']['ours']['median'] * 1e3:.3g} ms"
            rows.append([shape, row["op"], row["dtype"], ours, f"{row['spread']:.0%}", *others])
        return markdown(("shape", "direction", "dtype", "ours", "spread", *(f"vs {name}" for name in rivals)), rows)

    return table


# By the name on the page: the file of its results, and what makes it.
OP_TABLES: dict[str, tuple[str, Callable[[Results], str]]] = {
    "norm": ("norm_xeon", norm),
    "norm, Zen 4": ("norm_cpu", norm),
    "rope": ("rope_xeon", rope),
    "rope, Zen 4": ("rope_cpu", rope),
    "quantized_matmul": ("quantized_matmul_cpu", quantized_matmul),
    "quantized_matmul, Xeon": ("quantized_matmul_xeon", quantized_matmul),
    "quantized gradients": ("quantized_gradients_cpu", quantized_gradients),
    "quantized_embedding": ("quantized_embedding_xeon", quantized_embedding),
    "quantized_head": ("quantized_head_cpu", quantized_head),
    "quantized_head, Xeon": ("quantized_head_xeon", quantized_head),
    "mla_decode": ("mla_decode_cpu", mla_decode),
    "selective_scan": ("selective_scan_cpu", both_ways("mlx-lm")),
    "sigmoid_gate": ("sigmoid_gate_cpu", both_ways("MLX", "MLX compiled")),
    "causal_conv1d": (
        "causal_conv1d_cpu",
        both_ways("MLX conv1d", "MLX conv1d, compiled", "MLX products, compiled", "PyTorch"),
    ),
    "softmax_topk": ("softmax_topk_cpu", softmax_topk),
}

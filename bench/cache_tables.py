"""Tables of the page on attention over caches and ragged batches."""

from expert_tables import milliseconds, share, times
from op_tables import Results, markdown


def quantized_kv(results: Results) -> str:
    """Beside our own float16, and MLX, which dequantizes first."""
    lines = []
    for row in results["rows"]:
        peak = (f"{row['peak_bytes'][label] / 2**20:.1f}" for label in ("ours", "float16", "MLX"))
        what = f"{row['direction']}, {row['problem']}"
        cells = [what, str(row["bits"]), milliseconds(row), share(row["speedup"]["float16"])]
        lines.append([*cells, times(row["speedup"]["MLX"]), *peak])
    heads = ("", "bits", "ours", "vs float16", "vs MLX", "peak, MiB", "float16's", "MLX's")
    return markdown(heads, lines)


def ragged(results: Results) -> str:
    """Beside a call for each sequence, a mask in place of lengths, and MLX with that mask."""
    lines = []
    for row in results["rows"]:
        others = (row["speedup"].get(name) for name in ("a call each", "a mask"))
        cells = [row["op"], row["dtype"], milliseconds(row), *map(share, others)]
        lines.append([*cells, times(row["speedup"].get("MLX"))])
    return markdown(("", "dtype", "ours", "vs a call each", "vs a mask", "vs MLX"), lines)

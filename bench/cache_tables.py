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


def batches(results: Results) -> str:
    """Beside the same patched model with the mask as an array, and the unpatched model."""
    lines = []
    for row in results["rows"]:
        others = (times(row["speedup"][name]) for name in ("a mask", "MLX"))
        peaks = (f"{row['peak_bytes'][name] / 2**20:.1f}" for name in ("ours", "a mask", "MLX"))
        lines.append([row["op"], row["dtype"], milliseconds(row), *others, *peaks])
    heads = ("", "dtype", "patched", "vs a mask array", "vs MLX", "peak, MiB", "with the array", "MLX's")
    return markdown(heads, lines)


def paged(results: Results) -> str:
    """Beside the same call with a plan, contiguous keys and values, and MLX, which gathers first."""
    lines = []
    for row in results["rows"]:
        plan = milliseconds({"seconds": {"ours": row["seconds"]["plan"]}})
        lines.append(
            [row["op"], milliseconds(row), plan, share(row["speedup"]["contiguous"]), times(row["speedup"]["MLX"])]
        )
    return markdown(("float16", "ours", "with a plan", "vs contiguous", "vs MLX"), lines)


def appended(results: Results) -> str:
    """Beside MLX's rotation, quantization and slice updates."""
    lines = []
    for row in results["rows"]:
        seconds = (row["seconds"][label]["median"] for label in ("kv_append", "MLX"))
        cache = f"{row['bits']} bits" if row["bits"] else "plain"
        tokens = str(row["shape"][2])
        lines.append([tokens, row["dtype"], cache, *(f"{1e6 * t:.0f} us" for t in seconds), times(row["speedup"])])
    return markdown(("tokens", "dtype", "cache", "kv_append", "MLX", "vs MLX"), lines)


def memory(results: Results) -> str:
    """Of a prompt that fills mlx-lm's caches."""
    lines = []
    for row in results["rows"]:
        peaks = (f"{row['peak_bytes'][kind] / 2**20:.1f}" for kind in ("4 bits", "bfloat16"))
        lines.append([f"{row['length']:,}", *peaks, share(row["share"])])
    return markdown(("length", "4 bits, MiB", "bfloat16, MiB", "share"), lines)

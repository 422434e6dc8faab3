"""The tables of the pages on gated_delta and ssd_scan, and of training by length."""

from expert_tables import milliseconds, share, times
from op_tables import Results, markdown


def table(results: Results) -> str:
    """Beside mlx-lm's graph of MLX ops; steps beside a copy of as many bytes. Results may tell kinds of decays apart."""
    lines = []
    has_kinds = any("per_channel" in row for row in results["rows"])
    for row in results["rows"]:
        peaks = row.get("peak_bytes", {})
        of_both = [f"{peaks[label] / 2**20:.0f}" if label in peaks else "" for label in ("ours", "mlx-lm")]
        decay = ["channel" if row["per_channel"] else "head"] if has_kinds else []
        cells = [row["op"], str(row["shape"][0]), *decay, row["dtype"], milliseconds(row)]
        lines.append([*cells, share(row.get("share_of_copy")), times(row["speedup"].get("mlx-lm")), *of_both])
    kinds = ("decay per",) if has_kinds else ()
    heads = ("", "steps", *kinds, "dtype", "ours", "share of copy", "vs mlx-lm", "peak, MiB", "mlx-lm's")
    return markdown(heads, lines)


def _by_length(row: Results, label: str) -> list[str]:
    """Time and peak; empty where a contestant was not run."""
    if label not in row["seconds"]:
        return ["", ""]
    seconds, peak = row["seconds"][label]["median"], row["peak_bytes"][label]
    return [f"{seconds:.3g} s", f"{peak / 2**20:,.0f} MiB"]


def lengths(results: Results) -> str:
    """Forward and backward at each length that was run."""
    rows = ([f"{row['shape'][0]:,}", *_by_length(row, "ours"), *_by_length(row, "mlx-lm")] for row in results["rows"])
    return markdown(("steps", "ours", "peak", "mlx-lm's graph", "its peak"), rows)


def cuda(results: Results) -> str:
    """Microseconds on the GPU, and how many times as long the others take."""
    lines = []
    for row in results["rows"][1:]:
        peers = [f"{row[key]:.3g}" if (key := f"times_{peer}_gpu") in row else "" for peer in ("mlx_lm", "fla")]
        what, ours = row["what"].replace(", 1 steps", ", a step"), row["ours_gpu_us"]
        lines.append([what, f"{ours:,.0f} us", *peers])
    return markdown(("", "ours", "mlx-lm's ops", "FLA"), lines)

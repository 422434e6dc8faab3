"""The table of the page on gated_delta."""

from expert_tables import milliseconds, share, times
from op_tables import Results, markdown


def gated_delta(results: Results) -> str:
    """Beside mlx-lm's graph of MLX ops; steps beside a copy of as many bytes."""
    lines = []
    for row in results["rows"]:
        peaks = row.get("peak_bytes", {})
        of_both = [f"{peaks[label] / 2**20:.0f}" if label in peaks else "" for label in ("ours", "mlx-lm")]
        decay = "channel" if row["per_channel"] else "head"
        cells = [row["op"], str(row["shape"][0]), decay, row["dtype"], milliseconds(row)]
        lines.append([*cells, share(row.get("share_of_copy")), times(row["speedup"].get("mlx-lm")), *of_both])
    heads = ("", "steps", "decay per", "dtype", "ours", "share of copy", "vs mlx-lm", "peak, MiB", "mlx-lm's")
    return markdown(heads, lines)

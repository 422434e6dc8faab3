"""Tables of what was measured on several processes of one machine, for docs/distributed.md and the pages it links."""

from typing import Any

from op_tables import markdown

Results = dict[str, Any]


def milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f} ms" if abs(ms) >= 100 else f"{ms:.3g} ms"


def ring_attention(results: Results) -> str:
    rows = []
    for row in results["rows"]:
        medians = {key: timing["median"] for key, timing in row["seconds"].items()}
        several = row["processes"] > 1
        cells = [row["what"], str(row["processes"]), row["layout"] if several else "", f"{medians['ours']:.2f} s"]
        cells += [f"{row['of_ideal']:.2f}", f"{medians['transfers'] * 1e3:.0f} ms"] if several else ["", ""]
        rows.append([*cells, f"{row['peak_bytes'] / 1e6:.0f} MB", f"{row['memory']:.2f}"])
    heads = ("pass", "processes", "layout", "time", "of ideal", "transfers", "peak", "of one's")
    return markdown(heads, rows)


def tensor_parallel(results: Results) -> str:
    rows = []
    for row in results["rows"]:
        if row["op"] == "projection" or row["processes"] == 1:
            continue
        seconds = row["seconds"]
        times = [seconds["one"], seconds["compute"]["median"], row["communication"]]
        shares = [f"{row['of_ideal']:.2f}", f"{row['of_nth']:.2f}"]
        rows.append([row["op"], str(row["processes"]), *map(milliseconds, times), *shares])
    heads = ("step", "processes", "one process", "without sums", "sums and waiting", "of ideal", "of the n-th part")
    return markdown(heads, rows)


def overlap(results: Results) -> str:
    """The product and sum of a row-sharded projection."""
    rows = []
    for row in results["rows"]:
        if row["op"] == "projection":
            times = [timing["median"] for timing in row["seconds"].values()]
            rows.append([str(row["processes"]), str(row["rows"]), *map(milliseconds, times)])
    return markdown(("processes", "rows", "product", "sum", "both", "in 2 chunks", "in 4"), rows)


def sharded_cache(results: Results) -> str:
    rows = []
    for row in results["rows"]:
        cells = [row["op"], str(row["processes"]), milliseconds(row["seconds"]), f"{row['speedup']:.2f}"]
        cells.append(f"{row['exchange'] * 1e3:.2f} ms" if "exchange" in row else "")
        memory = row.get("cache_bytes", row.get("peak"))
        rows.append([*cells, "" if memory is None else f"{memory / 2**20:.0f} MiB"])
    return markdown(("step", "processes", "time", "speed-up", "exchange alone", "memory of a process"), rows)


def data_parallel(results: Results) -> str:
    rows = []
    for row in results["rows"]:
        times = [f"{timing['median'] * 1e3:.0f} ms" for timing in row["seconds"].values()]
        states = [f"{size / 1e6:.1f} MB" for size in row["bytes_of_state"].values()]
        rows.append([str(row["processes"]), *times, *states])
    heads = ("processes", "gradients", "sums", "MLX's step", "`ShardedOptimizer`", "state of AdamW", "sharded")
    return markdown(heads, rows)

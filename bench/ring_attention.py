"""Ring attention over a causal sequence that is split over processes of one thread each, beside one process.

    python bench/ring_attention.py                 # 16384 tokens, 1, 2 and 4 processes
    python bench/ring_attention.py --length 4096

writes bench/results/ring_attention_cpu.json. It starts the processes itself, on cores of their own, with MLX's ring
backend. One sequence in float32, 8 query heads over 2 key heads of 128. All processes begin a call together, and the
slowest of a round counts.

"One" is flash_attention of the whole sequence in one process. Processes that compute at the same time share caches,
memory and clock, so it is timed in all of them at the same time. "Transfers", in the table "sent", are the
messages of a call without its computation. "Ideal" is the n-th part of one, and the transfers: "of ideal" is our time
as a multiple of it. "Memory" is the peak of a process, its arrays and results included, as a share of the peak of one
process alone. With the contiguous layout the last rank has the most work.
"""

import statistics
from typing import Any

from harness import Timing, as_json, console_table, slowest, write_results

import click
from rich.console import Console

import ring_attention_ranks
from mlx_anvil.distributed import _local

LENGTH, HEADS, DIM = 16384, (8, 2), 128
RUNS = ((1, "contiguous"), (2, "zigzag"), (4, "zigzag"), (4, "contiguous"))
SECONDS = 900  # processes that still run then are killed


def rows_of(length: int, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ones: dict[tuple[str, int], Timing] = {}
    for processes, layout in RUNS:
        options = {"seconds": SECONDS, "environment": _local.ONE_THREAD, "apart": True}
        times_one = processes > 1 and layout == "zigzag"
        arguments = (length, HEADS, DIM, layout, rounds, times_one)
        found = _local.results(ring_attention_ranks.measured, processes, *arguments, **options)
        for what in found[0]:
            timings = {key: slowest(rank[what]["seconds"][key] for rank in found) for key in found[0][what]["seconds"]}
            ones |= {(what, processes): timings["one"]} if times_one else {}
            peak = max(rank[what]["peak"] for rank in found)
            alone = next((row["peak_bytes"] for row in rows if row["what"] == what), peak)
            row = {
                "what": what,
                "processes": processes,
                "layout": layout,
                "spread": round(timings["ours"].spread, 3),
                "seconds": {key: as_json(timing) for key, timing in timings.items()},
                "peak_bytes": peak,
                "mlx_peak_bytes": max(rank[what]["mlx_peak"] for rank in found),
                "memory": round(peak / alone, 3),
            }
            if processes > 1:
                ideal = ones[what, processes].median / processes + timings["transfers"].median
                row["of_ideal"] = round(timings["ours"].median / ideal, 3)
            rows.append(row)
    return rows


def print_rows(rows: list[dict[str, Any]], length: int) -> None:
    figures = ("n", "time", "one", "sent", "of ideal", "MB", "memory")
    table = console_table(f"Causal attention over {length} tokens, seconds", words=("", "layout"), figures=figures)
    for row in rows:
        medians = {key: timing["median"] for key, timing in row["seconds"].items()}
        several = row["processes"] > 1
        table.add_row(
            row["what"],
            row["layout"] if several else "",
            str(row["processes"]),
            f"{medians['ours']:.2f}",
            f"{medians['one']:.2f}" if "one" in medians else "",
            f"{medians['transfers']:.3f}" if several else "",
            f"{row['of_ideal']:.2f}" if several else "",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['memory']:.2f}",
        )
    Console().print(table)


@click.command()
@click.option("--length", default=LENGTH, show_default=True, help="tokens of the whole sequence")
@click.option("--rounds", default=3, show_default=True)
def main(length: int, rounds: int) -> None:
    rows = rows_of(length, rounds)
    if length == LENGTH:
        write_results("ring_attention_cpu", rows, length=length, heads=HEADS, head_dim=DIM, dtype="float32")
    print_rows(rows, length)
    worst = statistics.mean(row["spread"] for row in rows)
    Console().print(f"Interquartile ranges are {worst:.0%} of the medians, on average.")


if __name__ == "__main__":
    main()

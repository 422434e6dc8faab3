"""Ring attention over a causal sequence that is split over processes of one thread each, beside one process.

    python bench/ring_attention.py                 # 16384 tokens, 1, 2 and 4 processes
    python bench/ring_attention.py --length 4096

writes bench/results/ring_attention_cpu.json. It starts the processes itself, on this machine, with MLX's ring backend.
One sequence in float32, 8 query heads over 2 key heads of 128. One process runs ``flash_attention``; several run
``ring_attention`` with their part of the sequence. All begin a call together, and the slowest rank of a round counts.

"Transfers" are the messages of a call alone, without its computation. "Ideal" is the n-th part of the time of one
process, and the transfers; "time" is set against it. "Memory" is the peak of a process, its arrays and results
included, as a share of the peak of one process. MLX counts its own arrays; of that and what the process holds beyond
what it held before, the larger counts. With the contiguous layout the last rank has the most work.
"""

import statistics
from typing import Any

from harness import Timing, as_json, console_table, write_results

import click
from rich.console import Console

import ring_attention_ranks
from mlx_anvil.distributed import _local

LENGTH, HEADS, DIM = 16384, (8, 2), 128
PROCESSES = (1, 2, 4)
SECONDS = 900  # processes that still run then are killed


def slowest(found: list[dict[str, Any]], what: str, key: str) -> Timing:
    """Of the times of several ranks, the largest of each round."""
    return Timing.of([max(times) for times in zip(*(rank[what][key] for rank in found), strict=True)])


def rows_of(length: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    one: dict[str, dict[str, Any]] = {}
    for processes in PROCESSES:
        for layout in ("zigzag", "contiguous") if processes > 1 else ("contiguous",):
            arguments = (length, HEADS, DIM, layout, rounds)
            options = {"seconds": SECONDS, "environment": _local.ONE_THREAD}
            found = _local.results(ring_attention_ranks.measured, processes, *arguments, **options)
            for what in found[0]:
                time, transfers = slowest(found, what, "seconds"), slowest(found, what, "transfers")
                peak = max(rank[what]["peak"] for rank in found)
                row = {
                    "what": what,
                    "processes": processes,
                    "layout": layout,
                    "spread": round(time.spread, 3),
                    "seconds": {"ours": as_json(time), "transfers": as_json(transfers)},
                    "peak_bytes": peak,
                    "mlx_peak_bytes": max(rank[what]["mlx_peak"] for rank in found),
                }
                first = one.setdefault(what, row)
                ideal = first["seconds"]["ours"]["median"] / processes + (transfers.median if processes > 1 else 0)
                row |= {"of_ideal": round(time.median / ideal, 3), "memory": round(peak / first["peak_bytes"], 3)}
                rows.append(row)
    return rows


def print_rows(rows: list[dict[str, Any]], length: int) -> None:
    figures = ("time, s", "transfers, s", "of ideal", "peak, MB", "memory")
    table = console_table(f"Causal attention over {length} tokens", words=("", "layout", "n"), figures=figures)
    for row in rows:
        seconds = row["seconds"]
        alone = row["processes"] == 1
        table.add_row(
            row["what"],
            "" if alone else row["layout"],
            str(row["processes"]),
            f"{seconds['ours']['median']:.2f}",
            "" if alone else f"{seconds['transfers']['median']:.3f}",
            f"{row['of_ideal']:.2f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['memory']:.2f}",
        )
    Console().print(table)


@click.command()
@click.option("--length", default=LENGTH, show_default=True, help="tokens of the whole sequence")
@click.option("--rounds", default=5, show_default=True)
def main(length: int, rounds: int) -> None:
    rows = rows_of(length, rounds)
    if length == LENGTH:
        write_results("ring_attention_cpu", rows, length=length, heads=HEADS, head_dim=DIM, dtype="float32")
    print_rows(rows, length)
    worst = statistics.mean(row["spread"] for row in rows)
    Console().print(f"Interquartile ranges are {worst:.0%} of the medians, on average.")


if __name__ == "__main__":
    main()

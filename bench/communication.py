"""What messages between processes cost, and the rates of one thread: what the model of docs/distributed.md is fitted to.

    python bench/communication.py                   # 1 to 4 processes of one thread each
    python bench/communication.py --quick           # small sizes, few rounds; writes nothing

It starts the processes itself, on this machine, with MLX's ring backend, and writes
bench/results/communication_cpu.json. A transfer takes as long as its slowest rank: each round counts the largest of the
ranks' times. Sizes are those of the array that a rank passes in. Small ones are timed in chains of 8 that wait for each
other, inside one graph, as in the layers of a model.
"""

import os
from typing import Any

from harness import as_json, console_table, slowest, write_results

import click
from rich.console import Console
from rich.table import Table

import communication_ranks
from mlx_anvil.distributed import _local

MOST = 4
SIZES = [4 << shift for shift in range(10, 25, 2)]  # 4 KB to 64 MB
ROUNDS = 15
LAYERS = {1: 16, 128: 2}  # tokens: layers of a call
RING_LENGTH = 6144
CORES = 3  # that a process keeps busy during a transfer: MLX's ring has two threads that spin
SECONDS = 300  # processes that still run then are killed
Rows = list[dict[str, Any]]


def results(function: Any, processes: int, *arguments: Any) -> list[Any]:
    """Of every rank. Its process has one thread."""
    return _local.results(function, processes, *arguments, seconds=SECONDS, environment=_local.ONE_THREAD)


def of_slowest(rounds: list[list[float]]) -> dict[str, Any]:
    timing = slowest(rounds)
    return {"spread": round(timing.spread, 3), "seconds": as_json(timing)}


def transfer_rows(processes: int, sizes: list[int], rounds: int) -> Rows:
    found = results(communication_ranks.transfers, processes, sizes, rounds)
    return [
        {"what": what, "processes": processes, "bytes": size} | of_slowest([rank[what][size] for rank in found])
        for what in found[0]
        for size in sizes
    ]


def rate_rows(processes: int, rounds: int) -> Rows:
    """Rates of one process while all of them compute: they share the machine's memory."""
    found = results(communication_ranks.rates, processes, rounds)
    rows = []
    for name, first in found[0].items():
        times = of_slowest([rank[name]["seconds"] for rank in found])
        row = {"what": f"rate: {name}", "processes": processes, "unit": first["unit"], "work": first["work"]}
        rows.append(row | {"per_second": float(f"{first['work'] / times['seconds']['median']:.4g}")} | times)
    return rows


def scheme_rows(processes: int, length: int, rounds: int) -> Rows:
    rows = []
    for tokens, count in LAYERS.items():
        found = results(communication_ranks.layers, processes, tokens, count, rounds)
        rows += [
            {"what": f"layers: {part}", "processes": processes, "tokens": tokens, "layers": count}
            | of_slowest([rank[part] for rank in found])
            for part in ("layers", "compute")
        ]
    found = results(communication_ranks.ring, processes, length, rounds)
    rows += [
        {"what": f"ring: {part}", "processes": processes, "length": length} | of_slowest([rank[part] for rank in found])
        for part in ("ring", "compute")
    ]
    return rows


def short(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def transfer_table(rows: Rows) -> Table:
    counts = sorted({row["processes"] for row in rows if "bytes" in row})
    table = console_table("median per call, interquartile range", words=("", "size"), figures=map(str, counts))
    cells: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        if "bytes" in row:
            text = f"{short(row['seconds']['median'])} {row['spread']:.0%}"
            cells.setdefault((row["what"], row["bytes"]), []).append(text)
    for (what, size), line in cells.items():
        table.add_row(what, f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB", *line)
    return table


def other_table(rows: Rows) -> Table:
    counts = sorted({row["processes"] for row in rows})
    table = console_table("at the same time in each process", words=("",), figures=map(str, counts))
    cells: dict[str, list[str]] = {}
    for row in rows:
        if "bytes" not in row:
            name = row["what"].removeprefix("rate: ")
            if "tokens" in row:
                name += ", decode" if row["tokens"] == 1 else f", {row['tokens']} tokens"
            rate = f"{row['per_second'] / 1e9:.3g} G" if "per_second" in row else short(row["seconds"]["median"])
            cells.setdefault(name, []).append(rate)
    for name, line in cells.items():
        table.add_row(name, *line)
    table.caption = "G: 10^9 bytes or floating-point operations a second, of each process"
    return table


@click.command()
@click.option("--most", type=int, help=f"Processes, at most. Default: {MOST}, or as many as there are cores.")
@click.option("--quick", is_flag=True, help="Small sizes and few rounds; writes nothing.")
def main(most: int | None, quick: bool) -> None:
    """Runs the benchmark, prints its tables, writes its results."""
    console = Console()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = most or min(MOST, cores)
    sizes, rounds, length = (SIZES[:4], 3, 1024) if quick else (SIZES, ROUNDS, RING_LENGTH)
    rows: Rows = []
    for processes in range(1, most + 1):
        with console.status(f"{processes} processes"):
            if processes > 1:
                rows += transfer_rows(processes, sizes, rounds)
            rows += rate_rows(processes, rounds)
            rows += scheme_rows(processes, length, rounds)
    console.print(transfer_table(rows))
    console.print(other_table(rows))
    if cores < CORES * most:
        console.print(f"{cores} cores: with fewer than {CORES} for each process, transfers wait for a core")
    if not quick:
        console.print(f"written: {write_results('communication_cpu', rows, cores=cores, threads_of_a_process=1)}")


if __name__ == "__main__":
    main()

"""A data-parallel training step: what communication costs, what overlapping it saves, and the state of a process.

    python bench/data_parallel.py

writes bench/results/data_parallel_cpu.json. It starts 2 and 4 processes of one thread each, on this machine, with MLX's
ring backend. They train a stack of linear layers, each on its own rows.
In turn, and then in reverse: the gradients alone; the sums of them alone; and whole steps of AdamW, with MLX's
average_gradients in one graph with the backward pass, and with ShardedOptimizer. The sums alone wait for no gradient, so
a step without overlap takes about as long as both, and one with full overlap as long as the longer one.
"""

import time
from collections.abc import Callable
from typing import Any

from harness import Timing, as_json, console_table, ratio, slowest, write_results

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map
from rich.console import Console

from mlx_anvil import distributed
from mlx_anvil.distributed import _local

DIMS = 512
BUCKET_BYTES = 2 << 20
LABELS = ("gradients alone", "sums alone", "average_gradients, AdamW", "ShardedOptimizer")
SHORT = ("gradients", "sums", "MLX's step", "our step")
PROCESSES = (2, 4)
SECONDS = 300  # processes that still run then are killed


def runs_of(
    model: nn.Module, inputs: mx.array, group: mx.distributed.Group
) -> tuple[dict[str, Callable[[], None]], Any]:
    """The contestants, and the state of the optimizers that they step."""
    gradients_of = nn.value_and_grad(model, lambda model, x: model(x).square().mean())
    made = gradients_of(model, inputs)[1]
    mx.eval(made)
    alone = optim.AdamW(1e-4)
    sharded = distributed.ShardedOptimizer(optim.AdamW(1e-4), group, bucket_bytes=BUCKET_BYTES)
    stream = mx.new_stream(mx.cpu)

    def gradients() -> None:
        mx.eval(gradients_of(model, inputs))

    def sums() -> None:
        mx.eval(distributed.reduce_gradients(tree_map(mx.array, made), group, bucket_bytes=BUCKET_BYTES))

    def step_of_mlx() -> None:
        value, local = gradients_of(model, inputs)
        alone.update(model, nn.average_gradients(local, group, BUCKET_BYTES, stream))
        mx.eval(value, model.parameters(), alone.state)

    def step() -> None:
        value, local = gradients_of(model, inputs)
        sharded.update(model, local)
        mx.eval(value, model.parameters(), sharded.state)

    return dict(zip(LABELS, (gradients, sums, step_of_mlx, step), strict=True)), (alone, sharded)


def timed(runs: dict[str, Callable[[], None]], rounds: int, group: mx.distributed.Group) -> dict[str, Timing]:
    """As many rounds in every process: those of harness.measure depend on the time that a process sees."""
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    for number in range(rounds + 1):
        for label in list(runs)[:: 1 if number % 2 else -1]:
            mx.eval(mx.distributed.all_sum(mx.zeros(1), group=group))  # the processes start together
            begin = time.perf_counter()
            runs[label]()
            if number:
                seconds[label].append(time.perf_counter() - begin)
    return {label: Timing.of(each) for label, each in seconds.items()}


def measured(layers: int, rows: int, rounds: int) -> dict[str, Any]:
    """In each process: the times, and the bytes of the optimizers' states."""
    group = mx.distributed.init()
    mx.random.seed(0)
    model = nn.Sequential(*[nn.Linear(DIMS, DIMS, bias=False) for _ in range(layers)])
    inputs = mx.random.normal((rows, DIMS), key=mx.random.key(group.rank()))
    mx.eval(model.parameters(), inputs)
    with distributed.watch(group):
        runs, optimizers = runs_of(model, inputs, group)
        seconds = timed(runs, rounds, group)
    state = [sum(array.nbytes for _, array in tree_flatten(each.state)) for each in optimizers]
    return {"seconds": {label: each.rounds for label, each in seconds.items()}, "state": state}


def row_of(processes: int, layers: int, rows: int, rounds: int) -> dict[str, Any]:
    options = {"seconds": SECONDS, "environment": _local.ONE_THREAD, "apart": True}
    found = _local.results(measured, processes, layers, rows, rounds, **options)
    seconds = {label: slowest(rank["seconds"][label] for rank in found) for label in LABELS}
    return {
        "processes": processes,
        "layers": layers,
        "rows": rows,
        "bytes_of_gradients": layers * DIMS * DIMS * 4,
        "bytes_of_state": dict(zip(("AdamW", "sharded"), found[0]["state"], strict=True)),
        "seconds": {label: as_json(each) for label, each in seconds.items()},
        "speedup": round(ratio(seconds[LABELS[2]], seconds[LABELS[3]]), 2),
    }


@click.command()
@click.option("--layers", default=8, show_default=True)
@click.option("--rows", default=64, show_default=True, help="Of a process's batch.")
@click.option("--rounds", default=7, show_default=True, help="After a warm-up.")
def main(layers: int, rows: int, rounds: int) -> None:
    """Runs the benchmark, prints its table and writes its results."""
    found = [row_of(processes, layers, rows, rounds) for processes in PROCESSES]
    table = console_table(
        f"{layers} layers of {DIMS} dims: medians in ms, and the optimizer's state of a process in MB",
        figures=("n", *SHORT, "speedup", "state", "sharded"),
    )
    for row in found:
        times = [f"{row['seconds'][label]['median'] * 1e3:.0f}" for label in LABELS]
        states = [f"{each / 1e6:.1f}" for each in row["bytes_of_state"].values()]
        table.add_row(str(row["processes"]), *times, f"{row['speedup']:.2f}", *states)
    Console(width=80).print(table)
    print(f"written: {write_results('data_parallel_cpu', found)}")


if __name__ == "__main__":
    main()

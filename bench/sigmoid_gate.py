"""sigmoid_gate on the CPU, forward and gradient, against MLX (eager and compiled).

    python bench/sigmoid_gate.py

writes bench/results/sigmoid_gate_cpu.json. Rows are a decode step (1 x 4096) and a prompt (2048 x 4096): the output of
Qwen3-Next's attention. Figures are of interleaved rounds in one process, with reused memory (see bench/silu_gate.py).
"""

import itertools
from collections.abc import Callable
from typing import Any

from harness import comparison, console_table, write_results

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_anvil import sigmoid_gate
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

SHAPES = ((1, 4096), (2048, 4096))
RIVALS = ("MLX", "MLX compiled")


def plain(x: mx.array, gate: mx.array) -> mx.array:
    """What a model without this package writes."""
    return x * mx.sigmoid(gate)


def backward_of(function: Callable[..., mx.array]) -> Callable[..., list[mx.array]]:
    return lambda x, gate, dy: mx.vjp(function, [x, gate], [dy])[1]


def run_row(shape: tuple[int, int], dtype: mx.Dtype, backward: bool, rounds: int) -> dict[str, Any]:
    arrays = [mx.random.normal(shape).astype(dtype) for _ in range(3 if backward else 2)]
    mx.eval(arrays)
    functions: dict[str, Callable[..., Any]] = {"ours": sigmoid_gate, "MLX": plain}
    if backward:
        functions = {label: backward_of(function) for label, function in functions.items()}
    functions["MLX compiled"] = mx.compile(functions["MLX"])
    calls = {label: lambda f=f: mx.eval(f(*arrays)) for label, f in functions.items()}
    row = comparison("backward" if backward else "forward", dtype, shape, calls, rounds=rounds, budget_seconds=20)
    moved = arrays[0].nbytes * (5 if backward else 3)
    return row | {"gb_per_s": round(moved / row["seconds"]["ours"]["median"] / 1e9, 1)}


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "sigmoid_gate, CPU: medians; the rest are speed-ups of ours",
        words=("", "dtype", "shape"),
        figures=("ours, us", "GB/s", *RIVALS, "spread"),
    )
    for row in rows:
        ours = f"{row['seconds']['ours']['median'] * 1e6:.1f}"
        speedup = [f"{row['speedup'][label]:.1f}" for label in RIVALS]
        shape = " x ".join(map(str, row["shape"]))
        result.add_row(row["op"], row["dtype"], shape, ours, str(row["gb_per_s"]), *speedup, f"{row['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=9, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.random.seed(0)
    console = Console(width=170)
    results = []
    for shape, backward, dtype in itertools.product(SHAPES, (False, True), DTYPES):
        with console.status(f"{shape} {dtype_name(dtype)}"):
            results.append(run_row(shape, dtype, backward, rounds))
        mx.clear_cache()
    console.print(table(results))
    console.print(f"written: {write_results('sigmoid_gate_cpu', results)}")


if __name__ == "__main__":
    main()

"""quantized_embedding on the CPU against MLX's gathers and dequantisation.

    python bench/quantized_embedding.py

writes bench/results/quantized_embedding_cpu.json. Figures are from one run on two threads (or as many as
OMP_NUM_THREADS says); the matrix is that of a vocabulary of 32000 and a hidden size of 2048, ids are drawn at random.
"Floor" is what the cheapest of MLX's ops takes, the negative of one number: no node of a graph that is evaluated by
itself takes less. "In a graph" are 64 calls that are evaluated as one, as those of a model's step are, with ids that
are not there before.
"""

from collections.abc import Callable
from typing import Any

from harness import as_json, console_table, in_a_graph, measure, per_call, ratio, write_results

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_anvil import quantized_embedding
from mlx_anvil._check import dtype_name

VOCABULARY, HIDDEN = 32000, 2048
IDS = (1, 8, 64, 512)
FORMATS: tuple[dict[str, Any], ...] = (
    {"bits": 4, "group_size": 64, "mode": "affine"},
    {"bits": 8, "group_size": 64, "mode": "affine"},
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
)


def run_row(matrix: tuple[mx.array, ...], count: int, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    ids = mx.random.randint(0, VOCABULARY, (count,))
    mx.eval(ids)

    one = mx.ones(1)
    mx.eval(one)
    ops: dict[str, Callable[[mx.array], mx.array]] = {
        "ours": lambda ids: quantized_embedding(ids, *matrix, **options),
        "MLX": lambda ids: mx.dequantize(*(x[ids] for x in matrix), **options),
        "floor": lambda _: mx.negative(one),
    }
    timings = measure({k: lambda op=op: mx.eval(op(ids)) for k, op in ops.items()}, rounds=rounds, budget_seconds=0.5)
    unknown = {k: in_a_graph(lambda op=op: op(mx.stop_gradient(ids))) for k, op in ops.items()}
    graphs = measure(unknown, rounds=rounds, budget_seconds=0.5)
    seconds = timings | {f"{label}, in a graph": per_call(t) for label, t in graphs.items()}
    return {
        "op": "quantized_embedding",
        "format": options,
        "dtype": dtype_name(quantized_embedding(ids, *matrix, **options).dtype),
        "ids": count,
        "speedup": round(ratio(timings["MLX"], timings["ours"]), 2),
        "speedup_in_a_graph": round(ratio(graphs["MLX"], graphs["ours"]), 2),
        "spread": round(timings["ours"].spread, 3),
        "seconds": {label: as_json(t) for label, t in seconds.items()},
    }


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "quantized_embedding, CPU: medians in us",
        figures=("mode", "bits", "dtype", "ids", "ours", "MLX", "floor", "x", "in a graph: ours", "MLX", "x"),
    )
    for row in rows:
        us = {label: f"{t['median'] * 1e6:.0f}" for label, t in row["seconds"].items()}
        alone = [us["ours"], us["MLX"], us["floor"], f"{row['speedup']:.1f}"]
        graph = [us["ours, in a graph"], us["MLX, in a graph"], f"{row['speedup_in_a_graph']:.1f}"]
        cells = [row["format"]["mode"], str(row["format"]["bits"]), row["dtype"], str(row["ids"])]
        result.add_row(*cells, *alone, *graph)
    return result


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    rows = []
    for options in FORMATS:
        weights = mx.random.normal((VOCABULARY, HIDDEN)).astype(mx.bfloat16)
        matrix = tuple(mx.quantize(weights, **options))
        mx.eval(matrix)
        rows += [run_row(matrix, count, options, rounds) for count in IDS]
    console = Console(width=130)
    console.print(table(rows))
    console.print(f"written: {write_results('quantized_embedding_cpu', rows)}")


if __name__ == "__main__":
    main()

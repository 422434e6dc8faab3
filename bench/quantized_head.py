"""quantized_argmax and quantized_topk on the CPU against the product that they contain, and MLX's product and argmax.

    python bench/quantized_head.py

writes bench/results/quantized_head_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS
says); the matrix is that of a vocabulary of 128256 and a hidden size of 4096 (Llama 3) in 4 bits, which no cache holds.
What counts is the time over that of quantized_matmul alone, which stores the logits and searches none. MLX takes part
in float32, in which it is fastest.
"""

from collections.abc import Callable
from typing import Any

from harness import as_json, console_table, measure, ratio, write_results

import click
import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from mlx_anvil import quantized_argmax, quantized_matmul, quantized_topk
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

VOCABULARY, HIDDEN, GROUP = 128256, 4096, 64
ROWS = (1, 8)
OPS: dict[str, Callable[..., Any]] = {
    "product": quantized_matmul,
    "argmax": quantized_argmax,
    "top 40": lambda *arrays: quantized_topk(*arrays, k=40),
    "top 256": lambda *arrays: quantized_topk(*arrays, k=256),
}


def mlx_argmax(*arrays: mx.array) -> mx.array:
    return mx.argmax(mx.quantized_matmul(*arrays), axis=-1)


def draw(dtype: mx.Dtype, codes: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    per_group = (VOCABULARY, HIDDEN // GROUP)
    scales, biases = (factor * mx.random.normal(per_group) for factor in (0.01, 0.1))
    matrix = codes, scales.astype(dtype), biases.astype(dtype)
    mx.eval(matrix)
    return matrix


def run_row(matrix: tuple[mx.array, ...], count: int, rounds: int) -> dict[str, Any]:
    dtype = matrix[1].dtype
    x = mx.random.normal((count, HIDDEN)).astype(dtype)
    mx.eval(x)

    def contestant(op: Callable[..., Any]) -> Callable[[], None]:
        return lambda: mx.eval(op(x, *matrix))

    timings = measure({label: contestant(op) for label, op in OPS.items()}, rounds=rounds)
    row = {
        "dtype": dtype_name(dtype),
        "rows": count,
        "over_product": {label: round(ratio(timings[label], timings["product"]), 4) for label in OPS},
    }
    if dtype == mx.float32 and count == 1:
        beside_mlx = measure({"argmax": contestant(quantized_argmax), "MLX": contestant(mlx_argmax)}, rounds=3)
        row["speedup"] = round(ratio(beside_mlx["MLX"], beside_mlx["argmax"]), 2)
        timings["MLX"] = beside_mlx["MLX"]
    return {**row, "seconds": {label: as_json(t) for label, t in timings.items()}}


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        f"{VOCABULARY} x {HIDDEN}, 4 bits, CPU: the product in ms, the others in times of it",
        figures=("dtype", "rows", *OPS, "over MLX"),
    )
    for row in rows:
        cells = [f"{row['seconds']['product']['median'] * 1e3:.2f}"]
        cells += [f"{row['over_product'][label]:.3f}" for label in OPS if label != "product"]
        result.add_row(row["dtype"], str(row["rows"]), *cells, str(row.get("speedup", "")))
    return result


@click.command()
@click.option("--rounds", default=21, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    words = np.random.default_rng().integers(0, 2**32, (VOCABULARY, HIDDEN * 4 // 32), np.uint32)
    codes = mx.array(words)
    mx.eval(codes)
    rows = []
    for dtype in DTYPES:
        matrix = draw(dtype, codes)
        rows += [run_row(matrix, count, rounds) for count in ROWS]
    console = Console(width=130)
    console.print(table(rows))
    console.print(f"written: {write_results('quantized_head_cpu', rows)}")


if __name__ == "__main__":
    main()

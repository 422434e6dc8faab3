"""softmax_topk on the CPU against the router that models compose of MLX's ops.

    python bench/bench_softmax_topk.py

writes bench/results/softmax_topk_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS says).
MLX's contestants are the softmax of all logits, argpartition, take_along_axis and the division by the sum, which leave a
row in any order; and the same graph through ``mx.compile``.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from harness import as_json, measure, ratio, write_results
from mlx_anvil import softmax_topk
from mlx_anvil._check import dtype_name

ROWS = (1, 64, 4096)
EXPERTS = (8, 64, 128, 256)
CHOSEN = (2, 8)
DTYPES = (mx.float32, mx.bfloat16)
CONTESTANTS = ("ours", "MLX", "MLX compiled")


def composed(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    scores = mx.softmax(logits, axis=-1, precise=True)
    indices = mx.stop_gradient(mx.argpartition(-scores, kth=min(k, scores.shape[-1] - 1), axis=-1)[..., :k])
    weights = mx.take_along_axis(scores, indices, axis=-1)
    return weights / weights.sum(axis=-1, keepdims=True), indices


def contestants(logits: mx.array, k: int, gradient: bool) -> dict[str, Callable[[], None]]:
    def ours(x: mx.array) -> tuple[mx.array, mx.array]:
        return softmax_topk(x, k)

    def theirs(x: mx.array) -> tuple[mx.array, mx.array]:
        return composed(x, k)

    if not gradient:
        compiled = mx.compile(theirs)
        functions = (ours, theirs, compiled)
        return {label: lambda f=f: mx.eval(f(logits)) for label, f in zip(CONTESTANTS, functions, strict=True)}
    cotangent = mx.random.normal((*logits.shape[:-1], k)).astype(logits.dtype)
    mx.eval(cotangent)

    def both_ways(router: Callable[..., tuple[mx.array, mx.array]]) -> Callable[[mx.array], list[mx.array]]:
        return lambda x: mx.vjp(lambda y: router(y)[0], [x], [cotangent])[1]

    runs = (both_ways(ours), both_ways(theirs), mx.compile(both_ways(theirs)))
    return {label: lambda f=f: mx.eval(f(logits)) for label, f in zip(CONTESTANTS, runs, strict=True)}


def run_row(rows: int, experts: int, k: int, dtype: mx.Dtype, gradient: bool, rounds: int) -> dict[str, Any]:
    logits = mx.random.normal((rows, experts)).astype(dtype)
    mx.eval(logits)
    timings = measure(contestants(logits, k, gradient), rounds=rounds, budget_seconds=0.4)
    return {
        "op": "softmax_topk",
        "direction": "forward + backward" if gradient else "forward",
        "dtype": dtype_name(dtype),
        "shape": [rows, experts],
        "k": k,
        "speedup": {label: round(ratio(timings[label], timings["ours"]), 2) for label in CONTESTANTS[1:]},
        "spread": round(timings["ours"].spread, 3),
        "seconds": {label: as_json(t) for label, t in timings.items()},
    }


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="softmax_topk, CPU: medians in us")
    for name in ("direction", "dtype", "rows", "experts", "k", "ours", "MLX", "x", "MLX compiled", "x", "spread"):
        result.add_column(name, justify="right")
    for row in rows:
        us = {label: f"{row['seconds'][label]['median'] * 1e6:.1f}" for label in CONTESTANTS}
        speedup = {label: f"{x:.1f}" for label, x in row["speedup"].items()}
        beside = [cell for label in CONTESTANTS[1:] for cell in (us[label], speedup[label])]
        numbers = [str(n) for n in (*row["shape"], row["k"])]
        result.add_row(row["direction"], row["dtype"], *numbers, us["ours"], *beside, f"{row['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    cases = product((False, True), DTYPES, ROWS, EXPERTS, CHOSEN)
    rows = [run_row(*shape, dtype, gradient, rounds) for gradient, dtype, *shape in cases]
    console = Console(width=150)
    console.print(table(rows))
    console.print(f"written: {write_results('softmax_topk_cpu', rows)}")


if __name__ == "__main__":
    main()

"""softmax_topk on the CPU against the router that models compose of MLX's ops.

    python bench/softmax_topk.py

writes bench/results/softmax_topk_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS
says). MLX's contestants are the softmax of all logits, argpartition, take_along_axis and the division by the sum, which
leave a row in any order; and the same graph through ``mx.compile``, beside ours through it. MLX's softmax alone, which
chooses nothing, shows what one op costs at least: of one row, nearly all of it is handing the work to MLX's thread.
The router "DeepSeek-V3" has a bias and 8 groups, of which it keeps 4; MLX's contestant is mlx-lm's graph for it.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from harness import as_json, console_table, measure, ratio, write_results

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_anvil import softmax_topk
from mlx_anvil._check import dtype_name

ROWS = (1, 64, 4096)
EXPERTS = (8, 64, 128, 256)
CHOSEN = (2, 8)
DTYPES = (mx.float32, mx.bfloat16)
PAIRS = (("ours", "MLX"), ("ours compiled", "MLX compiled"))
ALONE = "softmax alone"
SOFTMAX, DEEPSEEK_V3 = "softmax", "DeepSeek-V3"
GROUPS, KEPT, SCALE = 8, 4, 2.5


def composed(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    scores = mx.softmax(logits, axis=-1, precise=True)
    indices = mx.stop_gradient(mx.argpartition(-scores, kth=min(k, scores.shape[-1] - 1), axis=-1)[..., :k])
    weights = mx.take_along_axis(scores, indices, axis=-1)
    return weights / weights.sum(axis=-1, keepdims=True), indices


def grouped(logits: mx.array, k: int, bias: mx.array) -> tuple[mx.array, mx.array]:
    """``group_expert_select`` of mlx-lm."""
    scores = mx.sigmoid(logits.astype(mx.float32))
    groups = mx.unflatten(scores + bias, axis=-1, shape=(GROUPS, -1))
    group_scores = mx.topk(groups, 2, axis=-1).sum(axis=-1, keepdims=True)
    left_out = GROUPS - KEPT
    worst = mx.stop_gradient(mx.argpartition(group_scores, kth=left_out - 1, axis=-2)[..., :left_out, :])
    masked = mx.flatten(mx.put_along_axis(groups, worst, mx.array(0.0), axis=-2), -2, -1)
    indices = mx.stop_gradient(mx.argpartition(-masked, kth=k - 1, axis=-1)[..., :k])
    weights = mx.take_along_axis(scores, indices, axis=-1)
    return (weights / weights.sum(axis=-1, keepdims=True) * SCALE).astype(logits.dtype), indices


def contestants(logits: mx.array, k: int, gradient: bool, router: str) -> dict[str, Callable[[], None]]:
    bias = 0.1 * mx.random.normal(logits.shape[-1:])
    mx.eval(bias)

    def ours(x: mx.array) -> tuple[mx.array, mx.array]:
        if router == SOFTMAX:
            return softmax_topk(x, k)
        more: dict[str, Any] = {
            "n_group": GROUPS,
            "topk_group": KEPT,
            "masked_score": 0,
            "routed_scaling_factor": SCALE,
        }
        return softmax_topk(x, k, scoring="sigmoid", e_score_correction_bias=bias, **more)

    def theirs(x: mx.array) -> tuple[mx.array, mx.array]:
        return composed(x, k) if router == SOFTMAX else grouped(x, k, bias)

    routers: dict[str, Callable[[mx.array], Any]] = {"ours": ours, "MLX": theirs}
    if gradient:
        cotangent = mx.random.normal((*logits.shape[:-1], k)).astype(logits.dtype)
        mx.eval(cotangent)
        routers = {
            label: lambda x, f=router: mx.vjp(lambda y: f(y)[0], [x], [cotangent])[1]
            for label, router in routers.items()
        }
    functions = routers | {f"{label} compiled": mx.compile(f) for label, f in routers.items()}
    if not gradient:
        functions[ALONE] = lambda x: mx.softmax(x, axis=-1)
    return {label: lambda f=f: mx.eval(f(logits)) for label, f in functions.items()}


def run_row(
    rows: int, experts: int, k: int, dtype: mx.Dtype, gradient: bool, rounds: int, router: str = SOFTMAX
) -> dict[str, Any]:
    logits = mx.random.normal((rows, experts)).astype(dtype)
    mx.eval(logits)
    timings = measure(contestants(logits, k, gradient, router), rounds=rounds, budget_seconds=0.4)
    return {
        "op": "softmax_topk",
        "router": router,
        "direction": "forward + backward" if gradient else "forward",
        "dtype": dtype_name(dtype),
        "shape": [rows, experts],
        "k": k,
        "speedup": {theirs: round(ratio(timings[theirs], timings[ours]), 2) for ours, theirs in PAIRS},
        "spread": round(timings["ours"].spread, 3),
        "seconds": {label: as_json(t) for label, t in timings.items()},
    }


def table(rows: list[dict[str, Any]]) -> Table:
    columns = (
        "router",
        "direction",
        "dtype",
        "rows",
        "experts",
        "k",
        "ours",
        "MLX",
        "x",
        "ours compiled",
        "MLX compiled",
        "x",
    )
    result = console_table("softmax_topk, CPU: medians in us", figures=(*columns, ALONE, "spread"))
    for row in rows:
        us = {label: f"{timing['median'] * 1e6:.1f}" for label, timing in row["seconds"].items()}
        beside = [cell for a, b in PAIRS for cell in (us[a], us[b], f"{row['speedup'][b]:.1f}")]
        numbers = [str(n) for n in (*row["shape"], row["k"])]
        cells = [row["router"], row["direction"], row["dtype"], *numbers, *beside, us.get(ALONE, "")]
        result.add_row(*cells, f"{row['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    cases = product((False, True), DTYPES, ROWS, EXPERTS, CHOSEN)
    rows = [run_row(*shape, dtype, gradient, rounds) for gradient, dtype, *shape in cases]
    for gradient, dtype, count in product((False, True), DTYPES, ROWS):
        rows.append(run_row(count, 256, 8, dtype, gradient, rounds, DEEPSEEK_V3))
    console = Console(width=150)
    console.print(table(rows))
    console.print(f"written: {write_results('softmax_topk_cpu', rows)}")


if __name__ == "__main__":
    main()

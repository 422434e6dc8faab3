"""moe_permute and moe_combine on the CPU against the graphs that mlx-lm's SwitchGLU and its models compose.

    python bench/moe.py

writes bench/results/moe_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS says).
``permute``: the sort by expert and the rows, as ``_gather_sort``. ``combine``: the rows back in order, times the
weights, summed, plus a residual, as ``_scatter_unsort`` and the end of a block. ``combine, shared``: plus a shared
expert behind a sigmoid gate (Qwen2-MoE). The shapes are those of Qwen3-30B-A3B: 2048 columns, 8 of 128 experts.
``share of copy`` is the rate of our forward pass (bytes read and written once) over that of a copy of as many bytes.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from harness import as_json, console_table, measure, ratio, share_of_copy, write_results

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_anvil import moe_combine, moe_permute
from mlx_anvil._check import dtype_name

TOKENS = (1, 64, 2048)
COLUMNS, EXPERTS, K = 2048, 128, 8
DTYPES = (mx.float32, mx.bfloat16)
PAIRS = (("ours", "MLX"), ("ours compiled", "MLX compiled"))
KINDS = ("permute", "combine", "combine, shared")
Function = Callable[..., mx.array]


def sorted_rows(x: mx.array, ids: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """``_gather_sort`` of mlx-lm."""
    flat = ids.flatten()
    order = mx.argsort(flat)
    return x[order // ids.shape[-1]], flat[order], mx.argsort(order)


def composed(y: mx.array, weights: mx.array, residual: mx.array, *shared: mx.array, inverse: mx.array) -> mx.array:
    rows = y[inverse.flatten()].reshape(*weights.shape, -1)  # _scatter_unsort
    out = (rows * weights[..., None]).sum(axis=-2) + residual
    return out + mx.sigmoid(shared[1]) * shared[0] if shared else out


def ours(y: mx.array, weights: mx.array, residual: mx.array, *shared: mx.array, inverse: mx.array) -> mx.array:
    more = dict(zip(("shared", "shared_gate"), shared, strict=False))
    return moe_combine(y, weights, inverse, residual=residual, **more)


def of(kind: str, tokens: int, dtype: mx.Dtype) -> tuple[dict[str, Function], list[mx.array], int]:
    """The contestants as functions of arrays, the arrays, and the bytes that a forward pass reads and writes."""
    pairs = tokens * K
    ids = mx.argsort(mx.random.uniform(shape=(tokens, EXPERTS)), axis=-1)[:, :K]
    inverse = mx.argsort(mx.argsort(ids.flatten())).reshape(tokens, K)
    shapes = [(pairs, COLUMNS), (tokens, K), (tokens, COLUMNS), (tokens, COLUMNS), (tokens, 1)]
    shapes = shapes[: 5 if kind.endswith("shared") else 3] if kind != "permute" else [(tokens, COLUMNS)]
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    mx.eval(ids, inverse, arrays)
    row = COLUMNS * dtype.size
    moved = pairs * row + (tokens * row if kind == "permute" else sum(x.nbytes for x in arrays[1:]) + tokens * row)
    if kind == "permute":
        functions: dict[str, Function] = {
            "ours": lambda x: moe_permute(x, ids, EXPERTS)[0],
            "MLX": lambda x: sorted_rows(x, ids)[0],
        }
    else:
        functions = {
            "ours": lambda *xs: ours(*xs, inverse=inverse),
            "MLX": lambda *xs: composed(*xs, inverse=inverse),
        }
    return functions, arrays, moved


def with_gradients(function: Function, arrays: list[mx.array]) -> Callable[..., list[mx.array]]:
    cotangent = mx.random.normal(function(*arrays).shape).astype(arrays[0].dtype)
    mx.eval(cotangent)
    return lambda *xs: mx.vjp(function, list(xs), [cotangent])[1]


def run_row(kind: str, tokens: int, dtype: mx.Dtype, gradient: bool, rounds: int) -> dict[str, Any]:
    functions, arrays, moved = of(kind, tokens, dtype)
    called: dict[str, Callable[..., Any]] = dict(functions)
    if gradient:
        called = {label: with_gradients(f, arrays) for label, f in functions.items()}
    called |= {f"{label} compiled": mx.compile(f) for label, f in called.items()}
    timed = {label: lambda f=f: mx.eval(f(*arrays)) for label, f in called.items()}
    timings = measure(timed, rounds=rounds, budget_seconds=0.4)
    row = {
        "op": "moe_permute" if kind == "permute" else "moe_combine",
        "kind": kind,
        "direction": "forward + backward" if gradient else "forward",
        "dtype": dtype_name(dtype),
        "tokens": tokens,
        "experts": EXPERTS,
        "k": K,
        "columns": COLUMNS,
        "speedup": {b: round(ratio(timings[b], timings[a]), 2) for a, b in PAIRS},
        "spread": round(timings["ours"].spread, 3),
        "seconds": {label: as_json(t) for label, t in timings.items()},
    }
    if not gradient and tokens == TOKENS[-1]:
        row["bytes"] = moved
        row["share_of_copy"], _ = share_of_copy(timed["ours"], moved, rounds=rounds, budget_seconds=0.4)
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    columns = (
        "op",
        "direction",
        "dtype",
        "tokens",
        "ours",
        "MLX",
        "x",
        "ours compiled",
        "MLX compiled",
        "x",
        "of copy",
    )
    result = console_table("moe, CPU: medians in us", figures=(*columns, "spread"))
    for row in rows:
        us = {label: f"{timing['median'] * 1e6:.1f}" for label, timing in row["seconds"].items()}
        beside = [cell for a, b in PAIRS for cell in (us[a], us[b], f"{row['speedup'][b]:.1f}")]
        cells = [row["kind"], row["direction"], row["dtype"], str(row["tokens"]), *beside]
        result.add_row(*cells, f"{row.get('share_of_copy', '')}", f"{row['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    cases = product(KINDS, (False, True), DTYPES, TOKENS)
    rows = [run_row(kind, tokens, dtype, gradient, rounds) for kind, gradient, dtype, tokens in cases]
    console = Console(width=150)
    console.print(table(rows))
    console.print(f"written: {write_results('moe_cpu', rows)}")


if __name__ == "__main__":
    main()

"""rope and rope_qk on the CPU against ``mx.fast.rope`` and copying the same bytes.

    python bench/rope.py

writes bench/results/rope_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS says). "In a
graph" are 64 calls that are evaluated as one, as a model's step is. The share of copy bandwidth, of arrays of over 1
MB, is against the faster of memcpy and of stores past the cache, which read and write as many bytes in all; every call,
the copies' too, has operands and outputs that caches no longer hold, or, "same data", the same arrays.
"""

import math
from collections.abc import Callable
from typing import Any

from harness import (
    as_json,
    console_table,
    in_a_graph,
    measure,
    on_other_data,
    operand_sets,
    per_call,
    ratio,
    share_of_copy,
    write_results,
)

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_anvil import rope, rope_qk
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

# (batch, q heads, kv heads, length, head_dim): one token, a few, a prompt, longer ones
SHAPES = (
    (1, 1, 1, 1, 64),
    (1, 32, 8, 1, 128),
    (8, 32, 8, 1, 128),
    (1, 32, 8, 64, 128),
    (1, 32, 8, 512, 128),
    (1, 32, 8, 2048, 128),
)
LARGE = (512, 2048)  # lengths


def contestants(traditional: bool) -> dict[str, Callable[[mx.array, mx.array], Any]]:
    def rope_of_each(q: mx.array, k: mx.array) -> list[mx.array]:
        return [rope(x, x.shape[-1], traditional=traditional, offset=77) for x in (q, k)]

    def rope_of_both(q: mx.array, k: mx.array) -> Any:
        return rope_qk(q, k, q.shape[-1], traditional=traditional, offset=77)

    def rope_of_mlx(q: mx.array, k: mx.array) -> list[mx.array]:
        options: dict[str, Any] = {"traditional": traditional, "base": 10000.0, "scale": 1.0, "offset": 77}
        return [mx.fast.rope(x, x.shape[-1], **options) for x in (q, k)]

    return {"rope": rope_of_each, "rope_qk": rope_of_both, "mx.fast.rope": rope_of_mlx}


def shares(rope_qk: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    """Of copy bandwidth, and what the contestants took."""
    total_bytes = 2 * sum(math.prod(shape) for shape in shapes) * dtype.size
    sets = operand_sets(shapes, dtype, total_bytes)
    limits: dict[str, Any] = {"rounds": 2 * rounds + 1, "budget_seconds": 0.3}
    share, seconds = share_of_copy(on_other_data(rope_qk, sets), total_bytes, sets=len(sets), **limits)
    same_share, same = share_of_copy(lambda: mx.eval(rope_qk(*sets[0])), total_bytes, **limits)
    return {
        "bytes": total_bytes,
        "share_of_copy": share,
        "share_of_copy_same_data": same_share,
        "seconds_beside_copies": {
            label: as_json(t) for label, t in (seconds | {f"{k}, same data": t for k, t in same.items()}).items()
        },
    }


def run_row(shape: tuple[int, ...], dtype: mx.Dtype, traditional: bool, rounds: int) -> dict[str, Any]:
    batch, q_heads, kv_heads, length, dim = shape
    shapes = [(batch, heads, length, dim) for heads in (q_heads, kv_heads)]
    q, k = (mx.random.normal(s).astype(dtype) for s in shapes)
    mx.eval(q, k)
    ops = contestants(traditional)
    runs = {label: lambda op=op: mx.eval(op(q, k)) for label, op in ops.items()}
    seconds = measure(runs, rounds=rounds, budget_seconds=0.5)
    row = {
        "op": "rope",
        "order": "traditional" if traditional else "halves",
        "dtype": dtype_name(dtype),
        "shape": list(shape),
        "speedup": {label: round(ratio(seconds["mx.fast.rope"], seconds[label]), 2) for label in ("rope", "rope_qk")},
        "spread": round(seconds["rope_qk"].spread, 3),
    }
    if length in LARGE:
        row |= shares(ops["rope_qk"], shapes, dtype, rounds)
    else:
        graphs = {label: in_a_graph(lambda op=op: op(q, k)) for label, op in ops.items() if label != "rope"}
        in_graphs = measure(graphs, rounds=rounds, budget_seconds=0.5)
        row["speedup_in_a_graph"] = round(ratio(in_graphs["mx.fast.rope"], in_graphs["rope_qk"]), 2)
        seconds |= {f"{label}, in a graph": per_call(t) for label, t in in_graphs.items()}
    return row | {"seconds": {label: as_json(t) for label, t in seconds.items()}}


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "rotary embedding of q and k, CPU: medians in us; speed-ups of rope_qk are over mx.fast.rope",
        figures=(
            "order",
            "dtype",
            "shape",
            "rope_qk",
            "x",
            "mx.fast.rope",
            "in a graph: x",
            "share of copy",
            "same data",
        ),
    )
    for row in rows:
        us = {label: f"{t['median'] * 1e6:.0f}" for label, t in row["seconds"].items()}
        cells = [us["rope_qk"], f"{row['speedup']['rope_qk']:.1f}", us["mx.fast.rope"]]
        more = [
            f"{row[name]:.2f}" if name in row else ""
            for name in ("speedup_in_a_graph", "share_of_copy", "share_of_copy_same_data")
        ]
        result.add_row(row["order"], row["dtype"], " x ".join(map(str, row["shape"])), *cells, *more)
    return result


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    rows = [
        run_row(shape, dtype, traditional, rounds)
        for shape in SHAPES
        for dtype in DTYPES
        for traditional in (False, True)
    ]
    console = Console(width=150)
    console.print(table(rows))
    console.print(f"written: {write_results('rope_cpu', rows)}")


if __name__ == "__main__":
    main()

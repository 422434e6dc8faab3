"""rms_norm and layer_norm on the CPU: against MLX's ops and against the machine's copy bandwidth.

    python bench/norm.py

writes bench/results/norm_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS says).

"Large" rows are shapes of which a copy takes long enough to compare with: the faster of memcpy and of stores past the
cache, which read and write as many bytes in all as the op does. Every call, the copies' too, has operands and outputs
that caches no longer hold, as in a model, where a layer's activations lie between two calls. "On the same data" is the
share where every call has the same arrays, which then stay in L3: in a model that happens for the smaller shapes only.
MLX has no CPU kernel of its own for these norms: mx.fast.rms_norm runs a graph of its ops there, and with a
residual a model adds first. The largest shape, on which that takes up to a second, is compared with copies only.

"Small" rows are calls as a decoder makes them, from one row up: by themselves, with all overheads (building the graph,
evaluating it, waking the thread of MLX's CPU stream, waiting for it), and as part of a graph of 64 that is evaluated as
one, as a model's step is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
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

from mlx_anvil import layer_norm, rms_norm
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

LARGEST = (2048, 4096)
LARGE = ((512, 4096), LARGEST)
SMALL = ((1, 128), (1, 4096), (8, 4096), (32, 128))


@dataclass(frozen=True)
class Kind:
    """One way of calling a norm, beside what a model writes with MLX's ops."""

    name: str
    arrays: int  # of the shape of x
    passes: int  # of as many bytes as x has, read or written
    ours: Callable[..., Any]
    mlx: Callable[..., Any]


def _residual_of_mlx(x: mx.array, weight: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]:
    h = x + residual
    return mx.fast.rms_norm(h, weight, 1e-5), h


def _gate_of_mlx(x: mx.array, weight: mx.array, gate: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, weight, 1e-5) * (gate * mx.sigmoid(gate))


def _gradients_of(norm: Callable[..., mx.array]) -> Callable[..., list[mx.array]]:
    return lambda x, weight, d_y: mx.vjp(norm, [x, weight], [d_y])[1]


def _rms_norm_of_mlx(x: mx.array, weight: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, weight, 1e-5)


KINDS = (
    Kind("rms_norm", 1, 2, rms_norm, _rms_norm_of_mlx),
    Kind("rms_norm, residual", 2, 4, lambda x, w, r: rms_norm(x, w, residual=r), _residual_of_mlx),
    Kind("rms_norm, gate", 2, 3, lambda x, w, g: rms_norm(x, w, gate=g), _gate_of_mlx),
    # The forward of a vjp is evaluated only where its result is asked for: not here.
    Kind("rms_norm, gradients", 2, 3, _gradients_of(rms_norm), _gradients_of(_rms_norm_of_mlx)),
    Kind("layer_norm", 1, 2, lambda x, w: layer_norm(x, w), lambda x, w: mx.fast.layer_norm(x, w, None, 1e-5)),
)


def large_row(kind: Kind, shape: tuple[int, int], dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    weight = mx.random.normal(shape[-1:]).astype(dtype)
    total_bytes = kind.passes * math.prod(shape) * dtype.size
    sets = operand_sets([shape] * kind.arrays, dtype, total_bytes)

    def ours(x: mx.array, *others: mx.array) -> Any:
        return kind.ours(x, weight, *others)

    # By themselves first: beside calls many times as long they would get few rounds, minutes apart.
    limits: dict[str, Any] = {"rounds": 2 * rounds + 1, "budget_seconds": 0.3}
    share, seconds = share_of_copy(on_other_data(ours, sets), total_bytes, sets=len(sets), **limits)
    cached_share, cached = share_of_copy(lambda: mx.eval(ours(*sets[0])), total_bytes, **limits)
    row = {
        "bytes": total_bytes,
        "gb_per_s": round(total_bytes / seconds["ours"].median / 1e9, 1),
        "share_of_copy": share,
        "share_of_copy_same_data": cached_share,
    }
    if shape != LARGEST:
        x, *others = sets[0]
        runs = {"ours": lambda: ours(x, *others), "MLX": lambda: kind.mlx(x, weight, *others)}
        beside = measure({k: lambda f=f: mx.eval(f()) for k, f in runs.items()}, rounds=rounds, budget_seconds=0.5)
        row["speedup_over_mlx"] = round(ratio(beside["MLX"], beside["ours"]), 2)
        seconds["MLX"] = beside["MLX"]
    same_data = {f"{label}, same data": t for label, t in cached.items()}
    return row | {"seconds": {label: as_json(t) for label, t in (seconds | same_data).items()}}


def small_row(kind: Kind, shape: tuple[int, int], dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    x, *others = (mx.random.normal(shape).astype(dtype) for _ in range(kind.arrays))
    arrays = [x, mx.random.normal(shape[-1:]).astype(dtype), *others]
    mx.eval(arrays)
    runs = {"ours": lambda: kind.ours(*arrays), "MLX": lambda: kind.mlx(*arrays)}
    alone = measure({k: lambda f=f: mx.eval(f()) for k, f in runs.items()}, rounds=rounds, budget_seconds=0.5)
    graphs = measure({k: in_a_graph(f) for k, f in runs.items()}, rounds=rounds, budget_seconds=0.5)
    seconds = alone | {f"{label}, in a graph": per_call(t) for label, t in graphs.items()}
    return {
        "speedup_over_mlx": round(ratio(alone["MLX"], alone["ours"]), 2),
        "speedup_over_mlx_in_a_graph": round(ratio(graphs["MLX"], graphs["ours"]), 2),
        "seconds": {label: as_json(t) for label, t in seconds.items()},
    }


def run_row(kind: Kind, shape: tuple[int, int], dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    measured = (large_row if shape in LARGE else small_row)(kind, shape, dtype, rounds)
    return {"op": kind.name, "dtype": dtype_name(dtype), "shape": list(shape)} | measured


def large_table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "norms of large arrays, CPU: medians in us",
        words=("", "dtype", "shape"),
        figures=("ours", "GB/s", "share of copy", "on the same data", "MLX", "x"),
    )
    for row in rows:
        us = {label: f"{t['median'] * 1e6:.0f}" for label, t in row["seconds"].items()}
        shares = [f"{row[name]:.2f}" for name in ("share_of_copy", "share_of_copy_same_data")]
        shape = " x ".join(map(str, row["shape"]))
        beside = [us.get("MLX", ""), str(row.get("speedup_over_mlx", ""))]
        result.add_row(row["op"], row["dtype"], shape, us["ours"], str(row["gb_per_s"]), *shares, *beside)
    return result


def small_table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "norms of few rows, CPU: medians in us",
        words=("", "dtype", "shape"),
        figures=("ours", "MLX", "x", "in a graph: ours", "MLX", "x"),
    )
    for row in rows:
        us = {label: f"{t['median'] * 1e6:.1f}" for label, t in row["seconds"].items()}
        shape = " x ".join(map(str, row["shape"]))
        alone = [us["ours"], us["MLX"], f"{row['speedup_over_mlx']:.1f}"]
        graph = [us["ours, in a graph"], us["MLX, in a graph"], f"{row['speedup_over_mlx_in_a_graph']:.1f}"]
        result.add_row(row["op"], row["dtype"], shape, *alone, *graph)
    return result


@click.command()
@click.option("--rounds", default=5, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.random.seed(0)
    console = Console(width=140)
    rows = []
    for shape in (*LARGE, *SMALL):
        for kind in KINDS:
            rows += [run_row(kind, shape, dtype, rounds) for dtype in DTYPES]
    console.print(large_table([row for row in rows if "bytes" in row]))
    console.print(small_table([row for row in rows if "bytes" not in row]))
    console.print(f"written: {write_results('norm_cpu', rows)}")


if __name__ == "__main__":
    main()

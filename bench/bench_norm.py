"""rms_norm and layer_norm on the CPU: against MLX's ops and against the machine's copy bandwidth.

    python bench/bench_norm.py

writes bench/results/norm_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS says).

"Large" rows are shapes of which a copy takes long enough to compare with: a copy reads and writes as many bytes in all
as the op does, from and to memory that is already mapped, by the faster of memcpy and of stores past the cache. MLX has
no CPU kernel of its own for these norms: mx.fast.rms_norm runs a graph of its ops there, and with a residual a model
adds first. The largest shape, on which that takes up to a second, is compared with copies only. "Small" rows are calls
as a decoder makes them, from one row up, with all overheads: building the graph, evaluating it, waiting.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from harness import Timing, as_json, measure, ratio, write_results
from mlx_anvil import _ext, layer_norm, rms_norm
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

REUSED_BYTES = 4 << 30
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


def copy_contestants(total_bytes: int) -> dict[str, Callable[[], None]]:
    # From and to MLX's own memory, as the ops: NumPy asks for huge pages where MLX does not.
    source, target = (np.asarray(mx.ones(total_bytes // 8)) for _ in range(2))
    return {
        "copy": lambda: _ext._copy(source, target, False),
        "copy past the cache": lambda: _ext._copy(source, target, True),
    }


def run_row(kind: Kind, shape: tuple[int, int], dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    x, *others = (mx.random.normal(shape).astype(dtype) for _ in range(kind.arrays))
    arrays = [x, mx.random.normal(shape[-1:]).astype(dtype), *others]
    mx.eval(arrays)
    total_bytes = kind.passes * x.nbytes
    ours, mlx = (lambda f=f: mx.eval(f(*arrays)) for f in (kind.ours, kind.mlx))
    row: dict[str, Any] = {"op": kind.name, "dtype": dtype_name(dtype), "shape": list(shape), "bytes": total_bytes}
    seconds: dict[str, Timing] = {}
    if shape in LARGE:
        # By themselves first: beside calls many times as long they would get few rounds, minutes apart.
        seconds = measure(copy_contestants(total_bytes) | {"ours": ours}, rounds=2 * rounds + 1)
        copy = min((seconds["copy"], seconds["copy past the cache"]), key=lambda t: t.median)
        row["gb_per_s"] = round(total_bytes / seconds["ours"].median / 1e9, 1)
        row["share_of_copy"] = round(ratio(copy, seconds["ours"]), 3)
    if shape != LARGEST:
        beside = measure({"ours": ours, "MLX": mlx}, rounds=rounds, budget_seconds=1)
        row["speedup_over_mlx"] = round(ratio(beside["MLX"], beside["ours"]), 2)
        seconds = beside | seconds
    row["seconds"] = {label: as_json(t) for label, t in seconds.items()}
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="norms, CPU: medians in us; speed-ups are of ours over MLX's")
    for name in ("", "dtype", "shape"):
        result.add_column(name)
    for name in ("ours", "GB/s", "share of copy", "MLX", "x"):
        result.add_column(name, justify="right")
    for row in rows:
        ours, mlx = (
            f"{row['seconds'][label]['median'] * 1e6:.1f}" if label in row["seconds"] else ""
            for label in ("ours", "MLX")
        )
        bandwidth = [str(row.get(name, "")) for name in ("gb_per_s", "share_of_copy")]
        speedup = f"{row['speedup_over_mlx']:.1f}" if mlx else ""
        shape = " x ".join(map(str, row["shape"]))
        result.add_row(row["op"], row["dtype"], shape, ours, *bandwidth, mlx, speedup)
    return result


@click.command()
@click.option("--rounds", default=5, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.random.seed(0)
    console = Console(width=140)
    mx.set_cache_limit(REUSED_BYTES)  # freed memory is kept, as a training loop would
    rows = []
    for shape in (*LARGE, *SMALL):
        for kind in KINDS:
            rows += [run_row(kind, shape, dtype, rounds) for dtype in DTYPES]
    console.print(table(rows))
    console.print(f"written: {write_results('norm_cpu', rows)}")


if __name__ == "__main__":
    main()

"""selective_scan on the CPU against the recurrence that mlx-lm's Mamba composes of MLX's ops.

    python bench/selective_scan.py

writes bench/results/selective_scan_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS
says), for the channels of Mamba-1.4B (4096) and 16 states, with D, gate and softplus. The contestant is mlx-lm's
loop: a graph of as many steps. That takes minutes for a long prompt, so it has 256 steps beside ours; rows of ours
alone show that time is linear in the steps. The rate is in updates of a state per second. A decode step reads and
writes the state, and ``state GB/s`` says how fast.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from harness import as_json, console_table, measure, peak_bytes, ratio, write_results

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_anvil import selective_scan
from mlx_anvil._check import dtype_name
from mlx_anvil.reference.selective_scan import selective_scan as loop

CHANNELS, STATES = 4096, 16
DTYPES = (mx.float32, mx.bfloat16)
BESIDE_MLX = (1, 256)
ALONE = (1024, 4096, 16384)
PEER = "mlx-lm"
Scan = Callable[..., tuple[mx.array, mx.array]]


def draw(steps: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    rows = {name: mx.random.normal((1, steps, CHANNELS)).astype(dtype) for name in ("x", "dt", "z")}
    states = {name: mx.random.normal((1, steps, STATES)).astype(dtype) for name in ("B", "C")}
    rates = -mx.repeat(mx.arange(1.0, STATES + 1)[None], CHANNELS, axis=0)
    arrays = rows | states | {"A": rates, "D": mx.ones((CHANNELS,))}
    arrays["state"] = mx.random.normal((1, CHANNELS, STATES))
    mx.eval(arrays)
    return arrays


def call(scan: Scan, arrays: dict[str, mx.array], cotangents: list[mx.array] | None) -> None:
    names = list(arrays)

    def function(*values: mx.array) -> list[mx.array]:
        return list(scan(**dict(zip(names, values, strict=True)), dt_softplus=True))

    values = list(arrays.values())
    mx.eval(mx.vjp(function, values, cotangents)[1] if cotangents else function(*values))


def run_row(steps: int, dtype: mx.Dtype, gradient: bool, rounds: int) -> dict[str, Any]:
    arrays = draw(steps, dtype)
    cotangents = [mx.ones_like(arrays["x"]), mx.ones_like(arrays["state"])] if gradient else None
    scans: dict[str, Scan] = {"ours": selective_scan} | ({PEER: loop} if steps in BESIDE_MLX else {})
    mx.eval(cotangents or [])
    timings = measure(
        {label: partial(call, scan, arrays, cotangents) for label, scan in scans.items()},
        rounds=rounds,
        budget_seconds=0.5,
    )
    updates = steps * CHANNELS * STATES
    row = {
        "op": "forward + backward" if gradient else "forward",
        "dtype": dtype_name(dtype),
        "shape": [1, steps, CHANNELS, STATES],
        "speedup": {name: round(ratio(timings[name], timings["ours"]), 1) for name in timings if name != "ours"},
        "spread": round(timings["ours"].spread, 3),
        "updates_per_second": round(updates / timings["ours"].median),
        "peak_bytes": peak_bytes(partial(call, selective_scan, arrays, cotangents)),
        "seconds": {label: as_json(t) for label, t in timings.items()},
    }
    if steps == 1 and not gradient:
        row["state_bytes_per_second"] = round(2 * arrays["state"].nbytes / timings["ours"].median)
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ("pass", "dtype", "steps", "ms", "mlx-lm", "x", "G/s", "MB", "spread")
    result = console_table("selective_scan, CPU: G updates of a state per second, peak MB", figures=columns)
    for row in rows:
        ms = {label: f"{timing['median'] * 1e3:.3g}" for label, timing in row["seconds"].items()}
        result.add_row(
            *(row["op"].replace("forward + ", ""), row["dtype"], str(row["shape"][1]), ms["ours"], ms.get(PEER, "")),
            f"{row['speedup'][PEER]:.0f}" if row["speedup"] else "",
            *(f"{row['updates_per_second'] / 1e9:.2f}", f"{row['peak_bytes'] / 1e6:.1f}", f"{row['spread']:.0%}"),
        )
    return result


@click.command()
@click.option("--rounds", default=5, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    rows = [
        run_row(steps, dtype, gradient, rounds)
        for gradient in (False, True)
        for dtype in DTYPES
        for steps in (*BESIDE_MLX, *ALONE)
    ]
    console = Console()
    console.print(table(rows))
    console.print(f"written: {write_results('selective_scan_cpu', rows)}")


if __name__ == "__main__":
    main()

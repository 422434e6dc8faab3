"""silu_gate on the CPU: forward and backward against MLX (eager and compiled), PyTorch and the machine's copy
bandwidth.

    python bench/silu_gate.py

writes bench/results/silu_gate_cpu.json; ``python bench/plot.py silu_gate_cpu`` draws it. Figures are from one run on
two threads (or as many as OMP_NUM_THREADS says).

The share of copy bandwidth and the speed-ups are measured one after the other, ours in both. Copying "the same bytes"
means a copy that reads and writes as many bytes in all as the op does, from and to memory that is already mapped, by
the faster of memcpy and of stores past the cache. "Reused" rows are what a plain script gets: the first large output
makes MLX keep freed memory. "Fresh" rows set the limit back to MLX's default of 32 MB, under which every large output
is new memory from the operating system.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

from harness import Timing, as_json, console_table, copies, installed_torch, measure, ratio, write_results

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from rich.console import Console
from rich.table import Table

from mlx_anvil import _ext, silu_gate
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

SHAPES = ((512, 4096), (4096, 11008))
MLX_CACHE_LIMIT = 32 << 20  # MLX's default on the CPU


def plain(gate: mx.array, up: mx.array) -> mx.array:
    """What a model without this package writes."""
    return nn.silu(gate) * up


def backward_of(function: Callable[..., mx.array]) -> Callable[..., list[mx.array]]:
    return lambda gate, up, dy: mx.vjp(function, [gate, up], [dy])[1]


def mlx_contestants(arrays: list[mx.array], backward: bool) -> dict[str, Callable[[], None]]:
    functions: dict[str, Callable[..., Any]] = {"ours": silu_gate, "MLX": plain}
    if backward:
        functions = {label: backward_of(function) for label, function in functions.items()}
    functions["MLX compiled"] = mx.compile(functions["MLX"])
    return {label: lambda f=f: mx.eval(f(*arrays)) for label, f in functions.items()}


def torch_contestant(arrays: list[mx.array], backward: bool) -> dict[str, Callable[[], None]]:
    """PyTorch on as many threads, where it is installed."""
    torch = installed_torch()
    if torch is None:
        return {}
    torch.set_num_threads(_ext._max_threads())
    dtype = getattr(torch, dtype_name(arrays[0].dtype))
    gate, up, *rest = (torch.from_numpy(np.array(x.astype(mx.float32))).to(dtype) for x in arrays)

    def forward() -> None:
        with torch.no_grad():
            torch.nn.functional.silu(gate) * up

    if not backward:
        return {"PyTorch": forward}
    gate.requires_grad_()
    up.requires_grad_()
    output = torch.nn.functional.silu(gate) * up
    return {"PyTorch": lambda: torch.autograd.grad(output, (gate, up), rest[0], retain_graph=True)}


def run_row(shape: tuple[int, int], dtype: mx.Dtype, backward: bool, fresh: bool, rounds: int) -> dict[str, Any]:
    arrays = [mx.random.normal(shape).astype(dtype) for _ in range(3 if backward else 2)]
    mx.eval(arrays)
    total_bytes = arrays[0].nbytes * (5 if backward else 3)
    of_mlx = mlx_contestants(arrays, backward)
    # Ours and the copies by themselves first: beside calls a hundred times as long they would get few rounds, minutes
    # apart.
    timings = measure(copies(total_bytes) | {"ours": of_mlx["ours"]}, rounds=2 * rounds + 1)
    copy = min((timings["copy"], timings["copy past the cache"]), key=lambda t: t.median)
    ours = timings["ours"]
    beside = measure(of_mlx | torch_contestant(arrays, backward), rounds=rounds)
    rivals = {label: t for label, t in beside.items() if label != "ours"}
    return {
        "op": "silu_gate",
        "direction": "backward" if backward else "forward",
        "dtype": dtype_name(dtype),
        "shape": list(shape),
        "memory": "fresh" if fresh else "reused",
        "bytes": total_bytes,
        "gb_per_s": round(total_bytes / ours.median / 1e9, 1),
        "copy_gb_per_s": round(total_bytes / copy.median / 1e9, 1),
        "share_of_copy": round(ratio(copy, ours), 3),
        "speedup": {label: round(ratio(t, beside["ours"]), 2) for label, t in rivals.items()},
        "spread": round(ours.spread, 3),
        "seconds": {label: as_json(t) for label, t in (timings | rivals).items()},
    }


def _ms(timing: dict[str, Any] | Timing | None) -> str:
    return "" if timing is None else f"{timing['median'] * 1e3:.2f}"


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "silu_gate, CPU: medians in ms; speed-ups are of ours over each",
        words=("", "dtype", "shape", "memory"),
        figures=("ours", "GB/s", "copy GB/s", "share", "MLX", "x", "compiled", "x", "PyTorch", "x", "spread"),
    )
    for row in rows:
        seconds, speedup = row["seconds"], row["speedup"]
        cells = [_ms(seconds["ours"]), str(row["gb_per_s"]), str(row["copy_gb_per_s"]), f"{row['share_of_copy']:.2f}"]
        for label in ("MLX", "MLX compiled", "PyTorch"):
            cells += [_ms(seconds.get(label)), f"{speedup[label]:.1f}" if label in speedup else ""]
        shape = " x ".join(map(str, row["shape"]))
        result.add_row(row["direction"], row["dtype"], shape, row["memory"], *cells, f"{row['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=11, help="Rounds per row, after a warm-up.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON; the tables go to stderr.")
def main(rounds: int, as_json: bool) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.random.seed(0)
    console = Console(width=170, stderr=as_json)
    rows = []
    for fresh, shape, backward, dtype in itertools.product((False, True), SHAPES, (False, True), DTYPES):
        if fresh and shape == SHAPES[0]:
            continue  # small blocks are reused either way
        if fresh:  # from here on
            mx.set_cache_limit(MLX_CACHE_LIMIT)
        with console.status(f"{shape} {dtype_name(dtype)}"):
            rows.append(run_row(shape, dtype, backward, fresh, rounds))
        mx.clear_cache()
    console.print(table(rows))
    if as_json:
        print(json.dumps(rows))
    console.print(f"written: {write_results('silu_gate_cpu', rows)}")


if __name__ == "__main__":
    main()

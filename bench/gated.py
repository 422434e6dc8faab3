"""gated on the CPU: each activation, forward and backward, against MLX (eager and compiled) and PyTorch.

    python bench/gated.py

writes bench/results/gated_cpu.json. Rows are a decode step (1 x 11008) and a training shape (1024 x 11008, or
--rows). Figures are of interleaved rounds in one process, with reused memory (see bench/silu_gate.py).
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

from harness import as_json, console_table, copies, measure, ratio, write_results

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from rich.console import Console
from rich.table import Table

from mlx_anvil import _ext, gated
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

COLUMNS = 11008
LIMIT = 7.0  # of GPT-OSS


def clamped(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    return mx.minimum(gate, LIMIT), mx.clip(up, -LIMIT, LIMIT)


def clamped_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    gate, up = clamped(gate, up)
    return nn.silu(gate) * up


def swiglu_oai(gate: mx.array, up: mx.array) -> mx.array:
    gate, up = clamped(gate, up)
    return (up + 1) * (gate * mx.sigmoid(1.702 * gate))


# What a model without this package writes, with the options of gated.
GATES: dict[str, tuple[dict[str, Any], Callable[..., mx.array]]] = {
    "gelu": ({"activation": "gelu"}, lambda gate, up: nn.gelu(gate) * up),
    "gelu_tanh": ({"activation": "gelu_tanh"}, lambda gate, up: nn.gelu_approx(gate) * up),
    "relu2": ({"activation": "relu2"}, lambda gate, up: nn.relu2(gate) * up),
    "silu, limit": ({"activation": "silu", "limit": LIMIT}, clamped_swiglu),
    "swiglu_oai": ({"activation": "swiglu_oai"}, swiglu_oai),
}


def backward_of(function: Callable[..., mx.array]) -> Callable[..., list[mx.array]]:
    return lambda gate, up, dy: mx.vjp(function, [gate, up], [dy])[1]


def torch_gate(name: str, gate: Any, up: Any) -> Any:
    import torch
    from torch.nn.functional import gelu, relu, silu

    if name in ("gelu", "gelu_tanh"):
        return gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up
    if name == "relu2":
        return relu(gate).square() * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return silu(gate) * up if name == "silu, limit" else (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def torch_contestant(name: str, arrays: list[mx.array], backward: bool) -> dict[str, Callable[[], None]]:
    """PyTorch on as many threads, where it is installed."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(_ext._max_threads())
    dtype = getattr(torch, dtype_name(arrays[0].dtype))
    gate, up, *rest = (torch.from_numpy(np.array(x.astype(mx.float32))).to(dtype) for x in arrays)

    def forward() -> None:
        with torch.no_grad():
            torch_gate(name, gate, up)

    if not backward:
        return {"PyTorch": forward}
    gate.requires_grad_()
    up.requires_grad_()
    output = torch_gate(name, gate, up)
    return {"PyTorch": lambda: torch.autograd.grad(output, (gate, up), rest[0], retain_graph=True)}


def run_row(name: str, shape: tuple[int, int], dtype: mx.Dtype, backward: bool, rounds: int) -> dict[str, Any]:
    options, plain = GATES[name]
    arrays = [mx.random.normal(shape).astype(dtype) for _ in range(3 if backward else 2)]
    mx.eval(arrays)
    total_bytes = arrays[0].nbytes * (5 if backward else 3)

    def ours(gate: mx.array, up: mx.array) -> mx.array:
        return gated(gate, up, **options)

    functions: dict[str, Callable[..., Any]] = {"ours": ours, "MLX": plain}
    if backward:
        functions = {label: backward_of(function) for label, function in functions.items()}
    functions["MLX compiled"] = mx.compile(functions["MLX"])
    calls = {label: lambda f=f: mx.eval(f(*arrays)) for label, f in functions.items()}
    # Ours and the copies first: beside calls a hundred times as long they would get few rounds, minutes apart.
    near = measure(copies(total_bytes) | {"ours": calls["ours"]}, rounds=2 * rounds + 1)
    copy = min((near["copy"], near["copy past the cache"]), key=lambda t: t.median)
    beside = measure(calls | torch_contestant(name, arrays, backward), rounds=rounds)
    rivals = {label: t for label, t in beside.items() if label != "ours"}
    return {
        "op": "gated",
        "activation": name,
        "direction": "backward" if backward else "forward",
        "dtype": dtype_name(dtype),
        "shape": list(shape),
        "bytes": total_bytes,
        "gb_per_s": round(total_bytes / near["ours"].median / 1e9, 1),
        "share_of_copy": round(ratio(copy, near["ours"]), 3),
        "speedup": {label: round(ratio(t, beside["ours"]), 2) for label, t in rivals.items()},
        "spread": round(near["ours"].spread, 3),
        "seconds": {label: as_json(t) for label, t in (near | rivals).items()},
    }


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "gated, CPU: medians; the last three are speed-ups of ours",
        words=("activation", "", "dtype", "shape"),
        figures=("ours, us", "GB/s", "share of copy", "MLX", "compiled", "PyTorch", "spread"),
    )
    for row in rows:
        speedup = [f"{row['speedup'][label]:.1f}" if label in row["speedup"] else "" for label in RIVALS]
        figures = [f"{row['seconds']['ours']['median'] * 1e6:.1f}", str(row["gb_per_s"]), f"{row['share_of_copy']:.2f}"]
        shape = " x ".join(map(str, row["shape"]))
        words = (row["activation"], row["direction"], row["dtype"], shape)
        result.add_row(*words, *figures, *speedup, f"{row['spread']:.0%}")
    return result


RIVALS = ("MLX", "MLX compiled", "PyTorch")


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
@click.option("--rows", default=1024, help="Rows of the training shape.")
@click.option("--json", "as_text", is_flag=True, help="Print the rows as JSON too.")
def main(rounds: int, rows: int, as_text: bool) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.random.seed(0)
    console = Console(width=170)
    results = []
    for count, name, backward, dtype in itertools.product((1, rows), GATES, (False, True), DTYPES):
        shape = (count, COLUMNS)
        with console.status(f"{name} {shape} {dtype_name(dtype)}"):
            results.append(run_row(name, shape, dtype, backward, rounds))
        mx.clear_cache()
    console.print(table(results))
    if as_text:
        print(json.dumps(results))
    console.print(f"written: {write_results('gated_cpu', results)}")


if __name__ == "__main__":
    main()

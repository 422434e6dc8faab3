"""causal_conv1d on the CPU, forward and gradient, against MLX (nn.Conv1d as models call it, and shifted products) and
PyTorch.

    python bench/causal_conv1d.py

writes bench/results/causal_conv1d_cpu.json. Rows are a decode step (1 x 1 x 8192) and a prompt (1 x 4096 x 8192, or
--length), of width 4 with SiLU and a state. A gradient is that of x, weight and state, with as much of the forward pass
as it needs; PyTorch's has all of it. Figures are of interleaved rounds in one process, on two threads (or as many as
OMP_NUM_THREADS says), with reused memory.

PyTorch gets x as [batch, channels, time], the layout of its own convolution.
"""

import itertools
from collections.abc import Callable
from typing import Any

from harness import comparison, console_table, installed_torch, write_results

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from rich.console import Console
from rich.table import Table

from mlx_anvil import _ext, causal_conv1d
from mlx_anvil._check import dtype_name

CHANNELS, WIDTH = 8192, 4
RIVALS = ("MLX conv1d", "MLX conv1d, compiled", "MLX products, compiled", "PyTorch")
Pair = tuple[mx.array, mx.array]


def by_conv1d(x: mx.array, weight: mx.array, state: mx.array) -> Pair:
    """What models write."""
    rows = mx.concatenate([state, x], axis=1)
    return nn.silu(mx.conv1d(rows, weight[..., None], groups=CHANNELS)), rows[:, 1 - WIDTH :]


def by_products(x: mx.array, weight: mx.array, state: mx.array) -> Pair:
    rows = mx.concatenate([state, x], axis=1)
    y = sum(rows[:, w : w + x.shape[1]] * weight[:, w] for w in range(WIDTH))
    return nn.silu(y), rows[:, 1 - WIDTH :]


def backward_of(function: Callable[..., Pair]) -> Callable[..., Any]:
    return lambda *arrays: mx.vjp(function, list(arrays[:3]), list(arrays[3:]))[1]


def torch_contestant(arrays: list[mx.array], backward: bool) -> dict[str, Callable[[], Any]]:
    """PyTorch on as many threads, where it is installed."""
    torch = installed_torch()
    if torch is None:
        return {}
    torch.set_num_threads(_ext._max_threads())
    dtype = getattr(torch, dtype_name(arrays[0].dtype))
    x, weight, state, *rest = (torch.from_numpy(np.array(a.astype(mx.float32))).to(dtype) for a in arrays)
    x, state = (a.transpose(1, 2).contiguous() for a in (x, state))
    inputs = [x, weight[:, None], state]

    def forward(x: Any, weight: Any, state: Any) -> Any:
        rows = torch.cat([state, x], dim=2)
        return torch.nn.functional.silu(torch.nn.functional.conv1d(rows, weight, groups=CHANNELS))

    def gradient() -> None:
        for array in inputs:
            array.requires_grad_()
        torch.autograd.grad(forward(*inputs), inputs, rest[0].transpose(1, 2))

    def value() -> None:
        with torch.no_grad():
            forward(*inputs)

    return {"PyTorch": gradient if backward else value}


def run_row(length: int, dtype: mx.Dtype, backward: bool, rounds: int) -> dict[str, Any]:
    shapes = [(1, length, CHANNELS), (CHANNELS, WIDTH), (1, WIDTH - 1, CHANNELS)]
    shapes += [shapes[0], shapes[2]] if backward else []
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    mx.eval(arrays)
    functions: dict[str, Callable[..., Any]] = {"ours": lambda x, weight, state: causal_conv1d(x, weight, None, state)}
    functions |= {"MLX conv1d": by_conv1d, "MLX products, compiled": by_products}
    if backward:
        functions = {label: backward_of(function) for label, function in functions.items()}
    functions["MLX conv1d, compiled"] = mx.compile(functions["MLX conv1d"])
    functions["MLX products, compiled"] = mx.compile(functions["MLX products, compiled"])
    calls = {label: lambda f=f: mx.eval(f(*arrays)) for label, f in functions.items()}
    passes = 3 if backward else 2  # over as many bytes as x has
    row = comparison(
        "backward" if backward else "forward",
        dtype,
        shapes[0],
        calls | torch_contestant(arrays, backward),
        rounds=rounds,
        budget_seconds=20,
    )
    ours = row["seconds"]["ours"]["median"]
    return row | {"gb_per_s": round(passes * arrays[0].nbytes / ours / 1e9, 1)}


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "causal_conv1d, CPU: medians; the rest are speed-ups of ours",
        words=("", "dtype", "shape"),
        figures=("ours, us", *RIVALS, "spread"),
    )
    for row in rows:
        speedup = [f"{row['speedup'][label]:.1f}" if label in row["speedup"] else "" for label in RIVALS]
        shape = " x ".join(map(str, row["shape"]))
        ours = f"{row['seconds']['ours']['median'] * 1e6:.0f}"
        result.add_row(row["op"], row["dtype"], shape, ours, *speedup, f"{row['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=5, help="Rounds per row, after a warm-up.")
@click.option("--length", default=4096, help="Rows of the prompt.")
def main(rounds: int, length: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.random.seed(0)
    console = Console(width=170)
    results = []
    for rows, backward, dtype in itertools.product((1, length), (False, True), (mx.float32, mx.bfloat16)):
        with console.status(f"{rows} {dtype_name(dtype)}"):
            results.append(run_row(rows, dtype, backward, rounds))
        mx.clear_cache()
    console.print(table(results))
    console.print(f"written: {write_results('causal_conv1d_cpu', results)}")


if __name__ == "__main__":
    main()

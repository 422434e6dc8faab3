"""ssd_scan on the CPU against mlx-lm's graph of MLX ops, ``ssm_attn``, and against the copy bandwidth.

    python bench/ssd_scan.py

writes bench/results/ssd_scan_cpu.json. The layer is that of Mamba-2 2.7B: 80 heads of 64, a group with 128 states, D,
and the softplus of dt with a bias. A step is that of 36 such layers: it reads and writes their states, which come from
the step before, and its share is that of copying as many bytes. Peaks are memory beyond the arguments.
"""

from functools import partial
from typing import Any

from harness import comparison, console_table, peak_bytes, share_of_copy, write_results

import click
import mlx.core as mx
from mlx_lm.models.ssm import ssm_attn
from rich.console import Console

import mlx_anvil
from gated_delta import LAYERS, Decode

HEADS, DIM, GROUPS, STATES = 80, 64, 1, 128
LIMIT = (0.001, 100.0)
DTYPES = (mx.float32, mx.bfloat16)
PROMPT, LONG, TRAINED = 128, 4096, 1024
Arrays = list[mx.array]


def draw(steps: int, dtype: mx.Dtype) -> Arrays:
    x = mx.random.normal((1, steps, HEADS, DIM))
    b, c = (mx.random.normal((1, steps, GROUPS, STATES)) for _ in range(2))
    dt, bias, log = mx.random.normal((1, steps, HEADS)), mx.random.normal((HEADS,)), mx.random.normal((HEADS,))
    arrays = [*(x.astype(dtype) for x in (x, dt, b, c)), log, mx.ones((HEADS,)), bias]
    arrays.append(mx.random.normal((1, HEADS, DIM, STATES)))
    mx.eval(arrays)
    return arrays


def ours(
    x: mx.array, dt: mx.array, b: mx.array, c: mx.array, log: mx.array, d: mx.array, bias: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    options = {"dt_bias": bias, "dt_softplus": True, "dt_limit": LIMIT}
    return mlx_anvil.ssd_scan(x, dt, -mx.exp(log), b, c, d, None, state, **options)


def theirs(
    x: mx.array, dt: mx.array, b: mx.array, c: mx.array, log: mx.array, d: mx.array, bias: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    return ssm_attn(x, log, b, c, d, dt, bias, state, LIMIT)


def forward(op: Any, arrays: Arrays) -> None:
    mx.eval(op(*arrays))


def backward(op: Any, arrays: Arrays) -> None:
    def loss(*given: mx.array) -> mx.array:
        y, state = op(*given)
        return y.astype(mx.float32).sum() + state.sum()

    mx.eval(mx.value_and_grad(loss, argnums=tuple(range(len(arrays))))(*arrays))


def step_row(dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    arrays = draw(1, dtype)
    calls = {"ours": Decode(ours, arrays), "mlx-lm": Decode(theirs, arrays)}
    limits = {"rounds": rounds, "budget_seconds": 0.5}
    share, _ = share_of_copy(calls["ours"], 2 * LAYERS * arrays[-1].nbytes, **limits)
    return comparison(f"step, {LAYERS} layers", dtype, (1,), calls, **limits, share_of_copy=share)


def row(what: str, steps: int, dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    arrays, run = draw(steps, dtype), forward if what == "prompt" else backward
    calls = {"ours": partial(run, ours, arrays), "mlx-lm": partial(run, theirs, arrays)}
    peaks = {label: peak_bytes(call) for label, call in calls.items()}
    return comparison(what, dtype, (steps,), calls, rounds=rounds, budget_seconds=1.0, peak_bytes=peaks)


@click.command()
@click.option("--rounds", default=5, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    rows = [step_row(dtype, rounds) for dtype in DTYPES]
    rows += [row("prompt", steps, dtype, rounds) for steps in (PROMPT, LONG) for dtype in DTYPES]
    rows += [row("forward + backward", steps, dtype, rounds) for steps in (PROMPT, TRAINED) for dtype in DTYPES]
    figures = ("steps", "ours, ms", "share of copy", "vs mlx-lm", "peak, MiB", "mlx-lm's")
    table = console_table("ssd_scan, CPU", words=("", "dtype"), figures=figures)
    for of in rows:
        milliseconds = f"{of['seconds']['ours']['median'] * 1e3:.2f}"
        share = f"{of['share_of_copy']:.2f}" if "share_of_copy" in of else ""
        peaks = [f"{of['peak_bytes'][x] / 2**20:.0f}" if "peak_bytes" in of else "" for x in ("ours", "mlx-lm")]
        table.add_row(
            *(of["op"], of["dtype"], str(of["shape"][0]), milliseconds, share, f"{of['speedup']['mlx-lm']:.1f}"), *peaks
        )
    console = Console(width=140)
    console.print(table)
    console.print(f"written: {write_results('ssd_scan_cpu', rows)}")


if __name__ == "__main__":
    main()

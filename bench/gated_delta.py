"""gated_delta on the CPU against mlx-lm's graph of MLX ops, ``gated_delta_ops``, and against the copy bandwidth.

    python bench/gated_delta.py

writes bench/results/gated_delta_cpu.json. The layer is that of Qwen3-Next: 16 heads of q and k and 32 of v, of 128; with
a factor per channel Kimi Linear's, 32 heads of each. A step is that of all layers of the model: it reads and writes
their states, which come from the step before, and its share is that of copying as many bytes. A prompt of 4096 takes
mlx-lm's graph minutes, so it has figures of ours alone. Peaks are memory beyond the arguments. Gates are the decays and
rates of a layer, beside mlx-lm's compiled ``compute_g`` and a sigmoid; a gradient leaves the forward out.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from harness import comparison, console_table, peak_bytes, share_of_copy, write_results

import click
import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops
from rich.console import Console

import mlx_anvil

DIM = 128
HEADS = {False: (16, 32), True: (32, 32)}  # without and with a factor per channel
DTYPES = (mx.float32, mx.bfloat16)
PROMPT, LONG, TRAINED = 128, 4096, 1024
LAYERS = 36  # of such states, which are more than caches hold
Arrays = list[mx.array]


def draw(steps: int, dtype: mx.Dtype, per_channel: bool) -> Arrays:
    key_heads, heads = HEADS[per_channel]
    q, k = (mx.random.normal((1, steps, key_heads, DIM)) / DIM**0.5 for _ in range(2))
    v = mx.random.normal((1, steps, heads, DIM))
    g = mx.random.uniform(0.8, 1.0, (1, steps, heads, DIM) if per_channel else (1, steps, heads))
    beta = mx.random.uniform(0.0, 1.0, (1, steps, heads))
    arrays = [*(x.astype(dtype) for x in (q, k, v)), g, beta, mx.random.normal((1, heads, DIM, DIM))]
    mx.eval(arrays)
    return arrays


class Decode:
    """A token in each layer of a model after the other, with the states of the token before."""

    def __init__(self, op: Callable[..., Any], arrays: Arrays) -> None:
        *self.arrays, state = arrays
        self.op, self.states = op, [state + layer for layer in range(LAYERS)]
        mx.eval(self.states)

    def __call__(self) -> None:
        before, self.states = self.states[::-1], []
        outputs = []
        while before:
            y, state = self.op(*self.arrays, before.pop())  # nothing else refers to it: the op may write in place
            outputs.append(y)
            self.states.append(state)
        mx.eval(outputs, self.states)


def forward(op: Callable[..., Any], arrays: Arrays) -> None:
    mx.eval(op(*arrays))


def backward(op: Callable[..., Any], arrays: Arrays) -> None:
    def loss(*given: mx.array) -> mx.array:
        y, state = op(*given)
        return y.astype(mx.float32).sum() + state.sum()

    mx.eval(mx.value_and_grad(loss, argnums=tuple(range(len(arrays))))(*arrays))


def step_row(dtype: mx.Dtype, per_channel: bool, rounds: int) -> dict[str, Any]:
    arrays = draw(1, dtype, per_channel)
    calls = {"ours": Decode(mlx_anvil.gated_delta, arrays), "mlx-lm": Decode(gated_delta_ops, arrays)}
    limits = {"rounds": rounds, "budget_seconds": 0.5}
    share, _ = share_of_copy(calls["ours"], 2 * LAYERS * arrays[5].nbytes, **limits)
    more = {"per_channel": per_channel, "share_of_copy": share}
    return comparison(f"step, {LAYERS} layers", dtype, (1,), calls, **limits, **more)


def prompt_row(
    what: str, steps: int, dtype: mx.Dtype, per_channel: bool, rounds: int, beside: bool = True
) -> dict[str, Any]:
    arrays, run = draw(steps, dtype, per_channel), forward if what == "prompt" else backward
    calls = {"ours": partial(run, mlx_anvil.gated_delta, arrays)}
    if beside:
        calls["mlx-lm"] = partial(run, gated_delta_ops, arrays)
    peaks = {label: peak_bytes(call) for label, call in calls.items()}
    limits = {"rounds": rounds, "budget_seconds": 1.0}
    return comparison(what, dtype, (steps,), calls, **limits, per_channel=per_channel, peak_bytes=peaks)


def gates_of_mlx_lm(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> tuple[mx.array, mx.array]:
    return compute_g(A_log, a, dt_bias), mx.sigmoid(b)


def gates_row(what: str, steps: int, dtype: mx.Dtype, per_channel: bool, rounds: int) -> dict[str, Any]:
    heads, channels = HEADS[per_channel][1], (DIM,) if per_channel else ()
    a, b = mx.random.normal((1, steps, heads, *channels)), mx.random.normal((1, steps, heads))
    weights = [mx.random.normal((heads, 1) if per_channel else (heads,)), mx.random.normal((heads, *channels))]
    arrays, cotangents = [a.astype(dtype), b.astype(dtype), *weights], [mx.random.normal(x.shape) for x in (a, b)]
    mx.eval(arrays, cotangents)

    def gradient(op: Callable[..., Any], arrays: Arrays) -> None:
        mx.eval(mx.vjp(lambda *given: list(op(*given)), arrays, cotangents)[1])

    ops = {"ours": mlx_anvil.gated_delta_gates, "mlx-lm": gates_of_mlx_lm}
    calls = {label: partial(forward if what == "gates" else gradient, op, arrays) for label, op in ops.items()}
    return comparison(what, dtype, (steps,), calls, rounds=rounds, budget_seconds=0.5, per_channel=per_channel)


@click.command()
@click.option("--rounds", default=5, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    cases = [(dtype, per_channel) for per_channel in (False, True) for dtype in DTYPES]
    rows = [step_row(*case, rounds) for case in cases]
    rows += [prompt_row("prompt", PROMPT, *case, rounds) for case in cases]
    rows += [prompt_row("prompt", LONG, *case, rounds, beside=False) for case in cases]
    rows += [prompt_row("forward + backward", PROMPT, *case, rounds) for case in cases[::2]]
    rows += [prompt_row("forward + backward", TRAINED, *case, rounds, beside=False) for case in cases[::2]]
    for what, steps in product(("gates", "gates, gradient"), (1, LONG)):
        rows += [gates_row(what, steps, *case, rounds) for case in cases[::2]]
    figures = ("ours, ms", "share of copy", "vs mlx-lm", "peak, MiB", "mlx-lm's")
    table = console_table("gated_delta, CPU", words=("", "decay per", "dtype"), figures=("steps", *figures))
    for row in rows:
        ours = f"{row['seconds']['ours']['median'] * 1e3:.2f}"
        beside = f"{row['speedup']['mlx-lm']:.1f}" if row["speedup"] else ""
        share = f"{row['share_of_copy']:.2f}" if "share_of_copy" in row else ""
        peaks = row.get("peak_bytes", {})
        of_both = [f"{peaks[x] / 2**20:.0f}" if x in peaks else "" for x in ("ours", "mlx-lm")]
        words = (row["op"], "channel" if row["per_channel"] else "head", row["dtype"])
        table.add_row(*words, str(row["shape"][0]), ours, share, beside, *of_both)
    console = Console(width=140)
    console.print(table)
    console.print(f"written: {write_results('gated_delta_cpu', rows)}")


if __name__ == "__main__":
    main()

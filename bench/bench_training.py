"""A training step of the examples' Llama on the CPU at long sequences, patched and not: time, attention's share of it, memory.

    python bench/bench_training.py

writes bench/results/training_cpu.json and training_cpu.png. The model is that of examples/train.py, one sequence a step. Peak memory
is all that MLX holds at once during a step after the first: parameters, the optimizer's state, activations, gradients. MLX's attention
holds matrices of length x length here, so it stops at the first length of MEMORY; times are taken at TIMED only.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import matplotlib
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import mlx_anvil
from harness import RESULTS, as_json, measure, ratio, write_results

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from common import COLORS, MLX, OURS, random_llama
from long_context import attentions
from train import loss

MODEL = {"dims": 128, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 352, "vocabulary": 96}
TIMED = 2048
LENGTHS = {OURS: (512, 1024, 2048, 4096, 8192, 16384), MLX: (512, 1024, 2048, 4096)}


def training_step(label: str, length: int) -> Callable[[], None]:
    """One step by Adam, on the same random characters each time."""
    model = random_llama(**MODEL, dtype=mx.float32)
    if label == OURS:
        mlx_anvil.patch(model)
    optimizer = optim.Adam(1e-3)
    loss_and_gradients = nn.value_and_grad(model, loss)
    tokens = mx.random.randint(0, MODEL["vocabulary"], (1, length + 1))

    def step() -> None:
        value, gradients = loss_and_gradients(model, tokens)
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)

    return step


def attention_step(label: str, length: int) -> Callable[[], None]:
    """What attention does in a step: forward and the gradients of q, k and v, in every layer."""
    head_dim = MODEL["dims"] // MODEL["heads"]
    heads = (MODEL["heads"], MODEL["kv_heads"], MODEL["kv_heads"])
    q, k, v = (mx.random.normal((1, count, length, head_dim)) for count in heads)
    cotangent = mx.random.normal(q.shape)
    mx.eval(q, k, v, cotangent)
    attend = attentions(None, head_dim**-0.5)[label]

    def run() -> None:
        for _ in range(MODEL["layers"]):
            mx.eval(mx.vjp(attend, [q, k, v], [cotangent]))

    return run


def peak_memory(label: str, length: int) -> int:
    step = training_step(label, length)
    step()  # the optimizer's state comes into being here
    mx.clear_cache()
    mx.reset_peak_memory()
    step()
    return int(mx.get_peak_memory())


def timed_row(length: int, rounds: int) -> dict[str, Any]:
    steps = {label: training_step(label, length) for label in (OURS, MLX)}
    attention = {f"{label}: attention": attention_step(label, length) for label in (OURS, MLX)}
    times = measure(steps | attention, rounds=rounds, least_seconds=0.0)
    return {
        "length": length,
        "tokens_per_second": {label: round(length / times[label].median, 1) for label in steps},
        "attention_share": {label: round(ratio(times[f"{label}: attention"], times[label]), 3) for label in steps},
        "speedup": round(ratio(times[MLX], times[OURS]), 2),
        "attention_speedup": round(ratio(times[f"{MLX}: attention"], times[f"{OURS}: attention"]), 1),
        "seconds": {label: as_json(t) for label, t in times.items()},
    }


def draw(peaks: dict[str, dict[int, int]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for label, curve in peaks.items():
        axis.plot(list(curve), [count / 2**20 for count in curve.values()], "o-", color=COLORS[label], label=label)
        for length, count in curve.items():
            axis.annotate(
                f"{count / 2**20:.0f}",
                (length, count / 2**20),
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10)
    axis.set_xticks(LENGTHS[OURS], [str(length) for length in LENGTHS[OURS]])
    axis.set(xlabel="sequence length", ylabel="peak memory of a training step, MiB", ylim=(10, None))
    axis.set_title(f"Llama, {MODEL['layers']} layers, {MODEL['heads']} heads, float32, CPU", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


@click.command()
@click.option("--rounds", default=3, help="Rounds of the timed steps, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its tables, writes its results."""
    console = Console()
    timed = timed_row(TIMED, rounds)
    table = Table("", "step", "attention", "share", "tokens/s", title=f"training step at length {TIMED}")
    for label in (OURS, MLX):
        seconds = [timed["seconds"][key]["median"] for key in (label, f"{label}: attention")]
        share, rate = timed["attention_share"][label], timed["tokens_per_second"][label]
        table.add_row(label, *(f"{s * 1e3:,.0f} ms" for s in seconds), f"{share:.0%}", f"{rate:,.0f}")
    console.print(table)
    console.print(f"{timed['speedup']}x faster; attention alone {timed['attention_speedup']}x")

    peaks: dict[str, dict[int, int]] = {label: {} for label in (OURS, MLX)}
    for label, lengths in LENGTHS.items():
        for length in lengths:
            with console.status(f"{label}, memory at {length}"):
                peaks[label][length] = peak_memory(label, length)
    table = Table("length", *peaks, title="peak memory, MiB")
    for length in LENGTHS[OURS]:
        table.add_row(str(length), *(f"{c[length] / 2**20:.1f}" if length in c else "" for c in peaks.values()))
    console.print(table)
    rows = [
        {"length": length, "peak_bytes": {label: peaks[label][length] for label in peaks if length in peaks[label]}}
        for length in LENGTHS[OURS]
    ]
    for row in rows:
        row |= timed if row["length"] == TIMED else {}
    fixed = {"op": "training step", "model": MODEL, "dtype": "float32"}
    console.print(f"wrote {write_results('training_cpu', [fixed | row for row in rows])}")
    draw(peaks, RESULTS / "training_cpu.png")


if __name__ == "__main__":
    main()

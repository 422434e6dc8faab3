"""A training step of the examples' Llama on the CPU at long sequences, patched and not: time, attention's share of it,
memory.

    python bench/training.py

writes bench/results/training_cpu.json and the plot of docs/training.md. The model is that of examples/train.py, one
sequence a step. Peak memory is all that MLX holds at once during a step after the first: parameters, the optimizer's
state, activations, gradients. MLX's attention holds matrices of length x length here, so it stops at the first length
of MEMORY; times are taken at TIMED only.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import as_json, measure, ratio, write_results

import click
import matplotlib.pyplot as plt
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from rich.console import Console
from rich.table import Table

import mlx_anvil

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from common import COLORS, MLX, OURS, random_llama

from long_context import attentions
from train import loss

MODEL = {"dims": 128, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 352, "vocabulary": 96}
TIMED = 2048
PLOT = Path(__file__).parent.parent / "docs" / "images" / "training_memory.png"
Peaks = dict[str, dict[int, int]]  # bytes of each label at each length
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


def timed_row(rounds: int) -> dict[str, Any]:
    steps = {label: training_step(label, TIMED) for label in LENGTHS}
    attention = {f"{label}: attention": attention_step(label, TIMED) for label in LENGTHS}
    times = measure(steps | attention, rounds=rounds, least_seconds=0.0)
    return {
        "tokens_per_second": {label: round(TIMED / times[label].median, 1) for label in steps},
        "attention_share": {label: round(ratio(times[f"{label}: attention"], times[label]), 3) for label in steps},
        "speedup": round(ratio(times[MLX], times[OURS]), 2),
        "attention_speedup": round(ratio(times[f"{MLX}: attention"], times[f"{OURS}: attention"]), 1),
        "seconds": {label: as_json(t) for label, t in times.items()},
    }


def draw(memory: Peaks, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for label, curve in memory.items():
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


def peaks(console: Console) -> Peaks:
    result: Peaks = {label: {} for label in LENGTHS}
    for label, lengths in LENGTHS.items():
        for length in lengths:
            with console.status(f"{label}, memory at {length}"):
                result[label][length] = peak_memory(label, length)
    return result


def tables(timed: dict[str, Any], memory: Peaks) -> list[Table]:
    times = Table("", "step", "attention", "share", "tokens/s", title=f"training step at length {TIMED}")
    for label in LENGTHS:
        seconds = [timed["seconds"][key]["median"] for key in (label, f"{label}: attention")]
        share, rate = timed["attention_share"][label], timed["tokens_per_second"][label]
        times.add_row(label, *(f"{s * 1e3:,.0f} ms" for s in seconds), f"{share:.0%}", f"{rate:,.0f}")
    bytes_at = Table("length", *memory, title="peak memory, MiB")
    for length in LENGTHS[OURS]:
        bytes_at.add_row(str(length), *(f"{c[length] / 2**20:.1f}" if length in c else "" for c in memory.values()))
    return [times, bytes_at]


def result_rows(timed: dict[str, Any], memory: Peaks) -> list[dict[str, Any]]:
    rows = []
    for length in LENGTHS[OURS]:
        row = {"op": "training step", "model": MODEL, "dtype": "float32", "length": length}
        row["peak_bytes"] = {label: curve[length] for label, curve in memory.items() if length in curve}
        rows.append(row | (timed if length == TIMED else {}))
    return rows


@click.command()
@click.option("--rounds", default=3, help="Rounds of the timed steps, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its tables, writes its results."""
    console = Console()
    timed = timed_row(rounds)
    memory = peaks(console)
    console.print(*tables(timed, memory))
    console.print(f"wrote {write_results('training_cpu', result_rows(timed, memory))}")
    draw(memory, PLOT)


if __name__ == "__main__":
    main()

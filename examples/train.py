"""Trains a character-level language model on a text file:

python examples/train.py                             # a Llama, on this repository's README
python examples/train.py book.txt --steps 500 --length 1024
python examples/train.py --architecture gated-delta  # linear attention, as in Qwen3-Next
python examples/train.py --lora                      # adapters on 4-bit weights
python examples/train.py --compare                   # with and without mlx-anvil, both curves in one plot
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import COLORS, DTYPES, MLX, OURS, check_heads, dtype_option, plot_option, random_llama, save, size

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import mlx_anvil
from delta_net import random_delta_net

README = Path(__file__).parent.parent / "README.md"
QUANTIZED = {"group_size": 32, "bits": 4}
ADAPTERS = {"rank": 8, "scale": 2.0, "dropout": 0.0}
NAMES = {"llama": "Llama", "gated-delta": "gated delta net"}  # architectures
ATTENTION_EVERY = 2


@dataclass
class Text:
    """A text encoded as indices of its characters in ``alphabet``."""

    alphabet: str
    tokens: np.ndarray

    @classmethod
    def read(cls, path: Path) -> "Text":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.ClickException(f"cannot read {path}: {error}") from error
        alphabet = "".join(sorted(set(text)))
        place = {character: index for index, character in enumerate(alphabet)}
        return cls(alphabet, np.array([place[character] for character in text], dtype=np.int32))

    def batches(self, steps: int, batch: int, length: int, seed: int) -> Iterator[mx.array]:
        """Yields ``steps`` arrays of ``batch`` excerpts, each of ``length`` characters and the next one."""
        if len(self.tokens) <= length:
            raise click.ClickException(
                f"the text has {len(self.tokens)} characters; sequences of --length {length} need at least {length + 1}."
            )
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            starts = rng.integers(0, len(self.tokens) - length, size=(batch, 1))
            yield mx.array(self.tokens[starts + np.arange(length + 1)])


def loss(model: nn.Module, tokens: mx.array) -> mx.array:
    """Returns the mean cross-entropy per character in nats. The logits are at least float32, for accuracy."""
    logits = model(tokens[:, :-1])
    logits = logits if logits.dtype == mx.float64 else logits.astype(mx.float32)
    return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")


def train(
    model: nn.Module,
    batches: Iterator[mx.array],
    optimizer: optim.Optimizer,
    on_step: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Trains the model in place. Returns the loss of every step."""
    loss_and_gradients = nn.value_and_grad(model, loss)
    losses = []
    for tokens in batches:
        value, gradients = loss_and_gradients(model, tokens)
        optimizer.update(model, gradients)
        # Evaluate everything at once, so that a step's activations are freed before the next step.
        mx.eval(value, model.trainable_parameters(), optimizer.state)
        losses.append(value.item())
        on_step(losses[-1])
    return losses


def add_adapters(model: Any) -> None:
    """Prepares the model for QLoRA: frozen 4-bit weights, and low-rank adapters on every projection."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    nn.quantize(model, **QUANTIZED)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), ADAPTERS)
    mx.eval(model.parameters())


@dataclass
class Run:
    label: str
    losses: list[float]
    tokens_per_second: float
    peak_bytes: int


def measured_run(label: str, model: nn.Module, text: Text, console: Console, options: dict[str, Any]) -> Run:
    """Trains with a progress bar. Returns the speed and the peak memory."""
    steps, batch, length = options["steps"], options["batch"], options["length"]
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[figures]}", TimeRemainingColumn())
    mx.reset_peak_memory()
    start = time.perf_counter()
    with Progress(*(TextColumn(c) if isinstance(c, str) else c for c in columns), console=console) as progress:
        task = progress.add_task(label, total=steps, figures="")

        def on_step(value: float) -> None:
            done = progress.tasks[task].completed + 1
            rate = done * batch * length / (time.perf_counter() - start)
            progress.update(task, advance=1, figures=f"loss {value:.3f}  {rate:,.0f} tokens/s")

        batches = text.batches(steps, batch, length, options["seed"])
        losses = train(model, batches, optim.Adam(options["learning_rate"]), on_step)
    rate = steps * batch * length / (time.perf_counter() - start)
    return Run(label, losses, rate, mx.get_peak_memory())


def draw(runs: list[Run], title: str, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")  # a plain Figure needs no display
    axis = figure.subplots()
    for index, run in enumerate(runs):
        # The second curve covers the first; dashes keep both visible.
        style = {"color": COLORS[run.label], "linestyle": "--" if index else "-", "linewidth": 1.5}
        axis.plot(range(1, len(run.losses) + 1), run.losses, label=run.label, **style)
    axis.set(xlabel="step", ylabel="loss, nats per character", title=title)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    save(figure, path)


def table_of(runs: list[Run]) -> Table:
    table = Table("", "first loss", "last loss", "tokens/s", "peak memory")
    for column in table.columns[1:]:
        column.justify = "right"
    for run in runs:
        cells = (f"{run.losses[0]:.3f}", f"{run.losses[-1]:.3f}", f"{run.tokens_per_second:,.0f}", size(run.peak_bytes))
        table.add_row(run.label, *cells)
    return table


@click.command()
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=README)
@click.option("--architecture", type=click.Choice(list(NAMES)), default="llama", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=200, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Sequences per step.")
@click.option("--length", type=click.IntRange(1), default=128, show_default=True, help="Characters per sequence.")
@click.option("--dims", type=click.IntRange(2), default=128, show_default=True, help="Hidden size.")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=4, show_default=True, help="Of q (linear attention: of v).")
@click.option(
    "--kv-heads", type=click.IntRange(1), default=2, show_default=True, help="Of k, v (linear attention: of q, k)."
)
@click.option(
    "--attention-every",
    type=click.IntRange(0),
    metavar="N",
    help=f"gated-delta: every N-th layer is attention; 0 is none.  [default: {ATTENTION_EVERY}]",
)
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=3e-3, show_default=True)
@dtype_option("float32")
@click.option("--lora", is_flag=True, help="QLoRA: train adapters on frozen 4-bit weights.")
@click.option("--anvil/--no-anvil", default=True, show_default=True, help="Swap mlx-anvil's ops into the model.")
@click.option("--compare", is_flag=True, help="Train with and without mlx-anvil, from the same weights.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of weights and batches.")
@plot_option("loss.png")
def main(text: Path, plot: Path, **options: Any) -> None:
    """Trains a character-level model on TEXT (default: this repository's README) and plots its loss."""
    check_heads(options["dims"], options["heads"], options["kv_heads"])
    if options["attention_every"] is not None and options["architecture"] == "llama":
        raise click.UsageError(
            "--attention-every is for --architecture gated-delta: every layer of a Llama is attention."
        )
    if options["lora"] and options["dims"] % QUANTIZED["group_size"]:
        raise click.UsageError(f"--dims {options['dims']}: --lora needs a multiple of {QUANTIZED['group_size']}.")
    console = Console()
    source = Text.read(text)
    console.print(f"{text.name}: {len(source.tokens):,} characters, {len(source.alphabet)} different ones")
    labels = [OURS, MLX] if options["compare"] else [OURS if options["anvil"] else MLX]
    runs = []
    for label in labels:
        model = new_model(label, len(source.alphabet), options)
        if label == OURS:
            console.print(mlx_anvil.patch(model))
        runs.append(measured_run(label, model, source, console, options))
        if label == OURS:
            mlx_anvil.unpatch(model)
    console.print(table_of(runs))
    kind = "QLoRA" if options["lora"] else options["dtype"]
    what = f"Character-level {NAMES[options['architecture']]} on {text.name}, {kind}, length {options['length']}"
    draw(runs, what, plot)
    console.print(f"wrote {plot}")


def new_model(label: str, vocabulary: int, options: dict[str, Any]) -> nn.Module:
    """Creates a model for the run of this label. The same seed gives the same weights."""
    mx.random.seed(options["seed"])
    shape = {key: options[key] for key in ("dims", "layers", "heads", "kv_heads")}
    # Llama's MLP is 8/3 as wide as its hidden size, rounded up to whole groups of the quantized formats.
    shape |= {
        "mlp": -(-options["dims"] * 8 // 3 // 32) * 32,
        "vocabulary": vocabulary,
        "dtype": DTYPES[options["dtype"]],
    }
    if options["architecture"] == "llama":
        model = random_llama(**shape)
    else:
        every = options["attention_every"]
        model = random_delta_net(label, **shape, attention_every=ATTENTION_EVERY if every is None else every)
    if options["lora"]:
        add_adapters(model)
    return model


if __name__ == "__main__":
    main()

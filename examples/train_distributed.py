"""Trains a character-level Llama on a text file in several processes:

mlx.launch -n 2 --backend ring --python "$(which python)" examples/train_distributed.py
mlx.launch -n 2 --backend ring --python "$(which python)" examples/train_distributed.py --sequence-parallel --length 512
python examples/train_distributed.py                 # the same in one process

The processes share each batch, or with --sequence-parallel each sequence. Every process keeps its part of the
optimizer's state. If one dies, the others end with an error that names it. Started again, the training goes on from the
last checkpoint, also with another number of processes.
"""

import json
import os
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from common import check_heads, random_llama

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

import mlx_anvil
from mlx_anvil import distributed
from train import README, Text, loss

MAX_NORM = 1.0
REPORT_EVERY = 10


@dataclass
class Checkpoint:
    """A file with the step, the parameters and the whole state of the optimizer."""

    path: Path

    def save(self, step: int, model: nn.Module, state: Any, settings: dict[str, Any]) -> None:
        """Replaces the file in one go: a process killed meanwhile leaves the old one."""
        arrays = dict(tree_flatten({"model": model.parameters(), "optimizer": state}))
        unfinished = self.path.with_suffix(".unfinished.safetensors")
        mx.save_safetensors(str(unfinished), arrays, {"step": str(step), "settings": json.dumps(settings)})
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(self.path)

    def load(self, model: nn.Module, optimizer: distributed.ShardedOptimizer, settings: dict[str, Any]) -> int:
        """Returns the number of steps done. Without a file, 0."""
        if not self.path.exists():
            return 0
        arrays, metadata = mx.load(str(self.path), return_metadata=True)
        saved = json.loads(metadata["settings"])
        if saved != settings:
            unlike = ", ".join(
                f"--{name.replace('_', '-')} {saved[name]}" for name in saved if saved[name] != settings[name]
            )
            raise click.ClickException(f"{self.path} is of a training with {unlike}; delete it, or give these options.")
        trees = tree_unflatten(list(arrays.items()))
        model.update(trees["model"])
        optimizer.load_full_state(trees["optimizer"], model.trainable_parameters())
        return int(metadata["step"])


def part(tokens: mx.array, group: mx.distributed.Group, sequence_parallel: bool) -> mx.array:
    """This process's sequences of a batch, or its part of all sequences with the one token after it."""
    rank, size = group.rank(), group.size()
    if not sequence_parallel:
        rows = tokens.shape[0] // size
        return tokens[rank * rows : (rank + 1) * rows]
    length = (tokens.shape[1] - 1) // size
    return tokens[:, rank * length : (rank + 1) * length + 1]


def attend_over_ring(model: Any, group: mx.distributed.Group) -> None:
    """Replaces the attention of an mlx-lm Llama: each process holds its part of the sequence, rank 0 the first one."""
    from mlx_lm.models import llama

    class RingAttention(llama.Attention):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            batch, length, _ = x.shape

            def heads(array: mx.array) -> mx.array:
                return array.reshape(batch, length, -1, self.head_dim).transpose(0, 2, 1, 3)

            first = group.rank() * length
            q, k = (self.rope(heads(project(x)), offset=first) for project in (self.q_proj, self.k_proj))
            output = distributed.ring_attention(
                q, k, heads(self.v_proj(x)), group=group, scale=self.scale, mask="causal"
            )
            return self.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, length, -1))

    for layer in model.layers:
        attention = RingAttention(model.args)
        attention.update(layer.self_attn.parameters())
        layer.self_attn = attention


def train(
    model: nn.Module,
    text: Text,
    checkpoint: Checkpoint,
    group: mx.distributed.Group,
    options: dict[str, Any],
    watcher: distributed.watch,
) -> None:
    adam = optim.AdamW(options["learning_rate"], bias_correction=True)
    optimizer = distributed.ShardedOptimizer(adam, group, max_norm=MAX_NORM)
    optimizer.init(model.trainable_parameters())
    # These decide the result. The number of processes and of steps may change at a checkpoint.
    settings = {name: options[name] for name in ("batch", "length", "dims", "layers", "heads", "kv_heads", "seed")}
    start = checkpoint.load(model, optimizer, settings)
    distributed.check_ranks(group, arrays=model, start=start, **settings, steps=options["steps"])
    if start and group.rank() == 0:
        click.echo(f"resumes after step {start}")
    gradients_of = nn.value_and_grad(model, loss)
    batches = islice(text.batches(options["steps"], options["batch"], options["length"], options["seed"]), start, None)
    begin = time.perf_counter()
    for step, tokens in enumerate(batches, start + 1):
        value, gradients = gradients_of(model, part(tokens, group, options["sequence_parallel"]))
        watcher.step()
        if options["sequence_parallel"]:
            # The backward pass communicates too, and two streams must not do so at a time.
            mx.eval(value, gradients)
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)
        if step % REPORT_EVERY == 0 or step == options["steps"]:
            mean = mx.distributed.all_sum(value, group=group).item() / group.size()
            speed = (step - start) * options["batch"] * options["length"] / (time.perf_counter() - begin)
            if group.rank() == 0:
                click.echo(f"step {step}  loss {mean:.6f}  {speed:,.0f} tokens/s")
        if step % options["save_every"] == 0 or step == options["steps"]:
            state = optimizer.full_state()
            if group.rank() == 0:
                checkpoint.save(step, model, state, settings)


@click.command()
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=README)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Sequences of a step, in sum.")
@click.option("--length", type=click.IntRange(1), default=128, show_default=True, help="Characters per sequence.")
@click.option("--dims", type=click.IntRange(2), default=128, show_default=True, help="Hidden size.")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=4, show_default=True)
@click.option("--kv-heads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=3e-3, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of weights and batches.")
@click.option("--sequence-parallel", is_flag=True, help="Split each sequence over the processes, not the batch.")
@click.option(
    "--checkpoint",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default="train_distributed.safetensors",
    show_default=True,
    help="Written by rank 0; the training goes on from it if it exists. All processes have to see it.",
)
@click.option("--save-every", type=click.IntRange(1), default=20, show_default=True, metavar="STEPS")
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=60,
    show_default=True,
    help="Seconds until a stalled process ends all.",
)
def main(text: Path, checkpoint: Path, **options: Any) -> None:
    """Trains a character-level model on TEXT (default: this repository's README)."""
    check_heads(options["dims"], options["heads"], options["kv_heads"])
    group = mx.distributed.init()
    shared = "length" if options["sequence_parallel"] else "batch"
    if options[shared] % group.size():
        raise click.UsageError(f"--{shared} {options[shared]} is not a multiple of {group.size()} processes.")
    if checkpoint.suffix != ".safetensors":
        raise click.UsageError(f"--checkpoint {checkpoint} does not end in .safetensors.")
    try:
        with distributed.watch(group, timeout=options["timeout"]) as watcher:
            click.echo(f"rank {group.rank()} of {group.size()}: pid {os.getpid()}")
            source = Text.read(text)
            model = new_model(len(source.alphabet), group, options)
            train(model, source, Checkpoint(checkpoint), group, options, watcher)
    except RuntimeError as error:
        if not str(error).startswith("[watch]"):
            raise
        raise click.ClickException(f"{error} Start again to go on from the last checkpoint.") from error


def new_model(vocabulary: int, group: mx.distributed.Group, options: dict[str, Any]) -> Any:
    """The same weights in all processes, as they draw them from the same seed."""
    mx.random.seed(options["seed"])
    shape = {name: options[name] for name in ("dims", "layers", "heads", "kv_heads")}
    mlp = -(-options["dims"] * 8 // 3 // 32) * 32
    model = random_llama(**shape, mlp=mlp, vocabulary=vocabulary, dtype=mx.float32)
    if options["sequence_parallel"]:
        attend_over_ring(model, group)
    report = mlx_anvil.patch(model)
    if group.rank() == 0:
        click.echo(report.summary)
    return model


if __name__ == "__main__":
    main()

"""Trains a small mixture of experts on a text, quantizes it, fine-tunes it with QLoRA, and lets it write:

python examples/moe.py                           # on this repository's README
python examples/moe.py book.txt --steps 300 --experts 16
python examples/moe.py --no-anvil                # with MLX's ops alone
"""

import time
from pathlib import Path
from typing import Any

from common import MLX, OURS, size

import click
import mlx.core as mx
import mlx.optimizers as optim
from rich.console import Console
from rich.table import Table

import mlx_anvil
from train import README, Text, add_adapters, train


def new_model(vocabulary: int, experts: int, chosen: int) -> Any:
    """Creates mlx-lm's Qwen3-MoE with random weights. Every layer has experts."""
    from mlx_lm.models import qwen3_moe

    args = qwen3_moe.ModelArgs(
        model_type="qwen3_moe",
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=experts,
        num_experts_per_tok=chosen,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        vocab_size=vocabulary,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    model = qwen3_moe.Model(args)
    mx.eval(model.parameters())
    return model


def write(model: Any, source: Text, prompt: str, count: int) -> tuple[str, float]:
    """Continues a prompt, always by the likeliest character. Returns the text and the characters per second."""
    from mlx_lm.models.cache import make_prompt_cache

    place = {character: index for index, character in enumerate(source.alphabet)}
    cache, token = make_prompt_cache(model), mx.array([[place[character] for character in prompt]])
    found, start = [], time.perf_counter()
    for _ in range(count):
        token = mx.argmax(model(token, cache=cache)[:, -1], axis=-1, keepdims=True)
        found.append(int(token.item()))
    rate = count / (time.perf_counter() - start)
    return "".join(source.alphabet[index] for index in found), rate


@click.command()
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=README)
@click.option("--steps", type=click.IntRange(1), default=60, show_default=True, help="Of training, and of QLoRA.")
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Sequences per step.")
@click.option("--length", type=click.IntRange(1), default=96, show_default=True, help="Characters per sequence.")
@click.option("--experts", type=click.IntRange(1), default=8, show_default=True)
@click.option("--chosen", type=click.IntRange(1), default=2, show_default=True, help="Experts per character.")
@click.option("--characters", type=click.IntRange(1), default=100, show_default=True, help="To write.")
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=3e-3, show_default=True)
@click.option("--anvil/--no-anvil", default=True, show_default=True, help="Swap mlx-anvil's ops into the model.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of weights and batches.")
def main(text: Path, **options: Any) -> None:
    """Trains a mixture of experts on TEXT (default: this repository's README), and fine-tunes it with QLoRA."""
    if options["chosen"] > options["experts"]:
        raise click.UsageError(f"--chosen {options['chosen']} is more than --experts {options['experts']}.")
    console, source = Console(), Text.read(text)
    mx.random.seed(options["seed"])
    model = new_model(len(source.alphabet), options["experts"], options["chosen"])
    table = Table("", "first loss", "last loss", "characters/s", "peak memory")
    per_step = options["batch"] * options["length"]
    for stage in ("training", "QLoRA"):
        if stage == "QLoRA":
            add_adapters(model)
        if options["anvil"]:
            report = mlx_anvil.patch(model)
            console.print(report.summary)
        mx.reset_peak_memory()
        batches = source.batches(options["steps"], options["batch"], options["length"], options["seed"])
        start = time.perf_counter()
        losses = train(model, batches, optim.Adam(options["learning_rate"]))
        rate = options["steps"] * per_step / (time.perf_counter() - start)
        cells = (f"{losses[0]:.3f}", f"{losses[-1]:.3f}", f"{rate:,.0f}", size(mx.get_peak_memory()))
        table.add_row(f"{stage}, {OURS if options['anvil'] else MLX}", *cells)
    console.print(table)
    written, rate = write(model, source, "# mlx-anvil\n", options["characters"])
    console.print(f"{written!r}\n{rate:,.0f} characters/s")


if __name__ == "__main__":
    main()

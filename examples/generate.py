"""Generates text with a 4-bit Llama, with and without mlx-anvil, and prints the tokens per second:

python examples/generate.py                        # random weights: for the speed only
python examples/generate.py --dims 2048 --mlp 5632 --layers 16 --heads 32 --kv-heads 8 --no-compare
python examples/generate.py --model path/to/model --prompt "Once upon a time"
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import DTYPES, MLX, OURS, check_heads, dtype_option, random_llama, size

import click
import mlx.core as mx
import mlx.nn as nn
from rich.console import Console
from rich.table import Table

import mlx_anvil

GROUP_SIZE = 32


@dataclass
class Generation:
    label: str
    tokens: list[int]
    prompt_tokens: int
    prefill_seconds: float  # until the first token
    decode_seconds: float  # for the tokens after the first
    peak_bytes: int

    def rates(self) -> tuple[float, float]:
        """Returns tokens per second for prefill and decode."""
        return self.prompt_tokens / self.prefill_seconds, (len(self.tokens) - 1) / self.decode_seconds


def generate(label: str, model: nn.Module, prompt: mx.array, count: int) -> Generation:
    """Generates ``count`` tokens greedily."""
    from mlx_lm.generate import generate_step

    mx.reset_peak_memory()
    start = time.perf_counter()
    tokens, first = [], start
    for token, _ in generate_step(prompt, model, max_tokens=count):
        if not tokens:
            first = time.perf_counter()
        tokens.append(int(token))
    return Generation(label, tokens, prompt.size, first - start, time.perf_counter() - first, mx.get_peak_memory())


@contextmanager
def patched(model: nn.Module, console: Console) -> Iterator[None]:
    console.print(mlx_anvil.patch(model))
    try:
        yield
    finally:
        mlx_anvil.unpatch(model)


def table_of(runs: list[Generation]) -> Table:
    table = Table("", "prefill, tokens/s", "decode, tokens/s", "peak memory")
    for column in table.columns[1:]:
        column.justify = "right"
    for run in runs:
        table.add_row(run.label, *(f"{rate:,.1f}" for rate in run.rates()), size(run.peak_bytes))
    if len(runs) == 2:
        faster = (f"{theirs / mine:.1f}x" for mine, theirs in zip(runs[1].rates(), runs[0].rates(), strict=True))
        table.add_section()
        table.add_row("faster", *faster, "")
    return table


@click.command()
@click.option(
    "--model",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A local model directory in the format of mlx-lm; without it, random weights of the shape below.",
)
@click.option("--prompt", help="Text to continue; requires --model. Default: random tokens.")
@click.option(
    "--prompt-tokens", type=click.IntRange(2), default=32, show_default=True, help="Length of a random prompt."
)
@click.option("--tokens", type=click.IntRange(2), default=16, show_default=True, help="Tokens to generate.")
@click.option("--dims", type=click.IntRange(2), default=512, show_default=True, help="Hidden size.")
@click.option("--layers", type=click.IntRange(1), default=4, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--kv-heads", type=click.IntRange(1), default=4, show_default=True)
@click.option("--mlp", type=click.IntRange(1), default=1408, show_default=True, help="Hidden size of the MLP.")
@click.option("--vocabulary", type=click.IntRange(2), default=4096, show_default=True)
@click.option(
    "--bits",
    type=click.Choice(["2", "3", "4", "5", "6", "8", "16"]),
    default="4",
    show_default=True,
    help="Bits of the random weights; 16 leaves them unquantized.",
)
@dtype_option("bfloat16")
@click.option("--compare/--no-compare", default=True, show_default=True, help="Run without mlx-anvil too.")
def main(folder: Path | None, prompt: str | None, compare: bool, **options: Any) -> None:
    """Measures a model's tokens per second with and without mlx-anvil's ops."""
    if prompt is not None and folder is None:
        raise click.UsageError("--prompt needs a tokenizer, and so --model.")
    console = Console()
    tokenizer = None
    if folder is None:
        model = new_model(options)
        vocabulary = options["vocabulary"]
    else:
        model, tokenizer = load(folder)
        vocabulary = len(tokenizer.vocab)
    if prompt is not None:
        ids = mx.array(tokenizer.encode(prompt))
    else:
        ids = mx.random.randint(0, vocabulary, (options["prompt_tokens"],))

    with patched(model, console):
        generate(OURS, model, ids[:2], 2)  # warm up threads and memory
        runs = [generate(OURS, model, ids, options["tokens"])]
    if compare:
        with console.status("the same without mlx-anvil"):
            runs.append(generate(MLX, model, ids, options["tokens"]))
    if prompt is not None:
        console.print(prompt, style="dim", end="")
        console.print(tokenizer.decode(runs[0].tokens), highlight=False)
    console.print(table_of(runs))


def new_model(options: dict[str, Any]) -> nn.Module:
    check_heads(options["dims"], options["heads"], options["kv_heads"])
    shape = {key: options[key] for key in ("dims", "layers", "heads", "kv_heads", "mlp", "vocabulary")}
    model = random_llama(**shape, dtype=DTYPES[options["dtype"]])
    if options["bits"] != "16":
        for name in ("dims", "mlp"):
            if options[name] % GROUP_SIZE:
                raise click.UsageError(f"--{name} {options[name]}: quantized weights need a multiple of {GROUP_SIZE}.")
        nn.quantize(model, group_size=GROUP_SIZE, bits=int(options["bits"]))
        mx.eval(model.parameters())
    return model


def load(folder: Path) -> tuple[Any, Any]:
    from mlx_lm import load as load_model

    try:
        return load_model(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise click.ClickException(f"{folder} holds no model that mlx-lm loads: {error}") from error


if __name__ == "__main__":
    main()

"""Generating text on the CPU: a 4-bit Llama of mlx-lm as it is, after mlx_anvil.patch, and one in llama.cpp beside it.

    python bench/lm.py [--dtype bfloat16] [--without-llama-cpp] [--without-mlx]

writes bench/results/lm_cpu.json; rows of dtypes that were not asked for stay in it. 16 layers, hidden 2048,
intermediate 5632, 32/8 heads, vocabulary 32000; random weights, 4 bits in groups of 64 (llama.cpp: Q4_0, the same 4.5
bits a weight). Weights are in huge pages (mlx_anvil.use_huge_pages). Ours has a row for each number of bits that
products keep of their input (activation_bits). The float32 model is what users have: one that was quantized in float16
and set to float32. Ours stores its scales as float16 again (repack=True), MLX's has them in float32.

Decode: 32 tokens one after another, each behind 64 others, as mlx_lm.generate makes them: the graph of the next is
built while the current one is evaluated. Beside it one read of the weights' bytes from memory, which no token can beat.
Prefill: 64 tokens into an empty cache, logits of the last. Both are timed around the model, as speed tests of language
models are: without a tokenizer, and greedy.

MLX alone is slow enough to be timed once, between calls of ours: the ratio is to the median of those. Of a prefill it
runs one layer and all that is not a layer (embedding, last norm, output head); the time of the model is taken to be the
latter and 16 times the former. In float16 that layer gets 8 of the 64 tokens, and counts 8 times more.
"""

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import RESULTS, Timing, as_json, console_table, measure, ratio, write_results

import click
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from rich.console import Console
from rich.table import Table

from mlx_anvil import _ext, use_huge_pages
from mlx_anvil._check import dtype_name
from mlx_anvil.bench.model import LlamaShape, decode_step, generation, prefill, random_llama, random_tokens
from mlx_anvil.bench.random_weights import patched_twin
from mlx_anvil.bench.timing import seconds_of
from mlx_anvil.reference import DTYPES

SHAPE = LlamaShape(hidden=2048, layers=16, intermediate=5632, heads=32, kv_heads=8, vocabulary=32000)
PROMPT = 64
# A decoder gets faster over the first tokens after anything else ran: one token by itself says little of generating.
TOKENS_A_ROUND = 32
NAME = "lm_cpu"
LLAMA, READ = "llama.cpp", "read"
Run = Callable[[], Any]


def layers_of(model: Any, count: int) -> Any:
    """The model reduced to its first layers."""
    part = copy.deepcopy(model)
    part.model.layers = part.model.layers[:count]
    return part


def head_only(model: Any, tokens: mx.array) -> Run:
    """What a prefill does outside of layers."""

    def run() -> None:
        hidden = model.model.norm(model.model.embed_tokens(tokens))
        mx.eval(mx.argmax(model.lm_head(hidden[:, -1]), axis=-1))

    return run


def around(ours: Run, slow: Run) -> tuple[Timing, float]:
    """Rounds of ours before and after one call of what takes long, which is not called for warming up."""
    ours()
    before = [seconds_of(ours) for _ in range(3)]
    once = seconds_of(slow)
    return Timing.of(before + [seconds_of(ours) for _ in range(3)]), once


@dataclass
class Mlx:
    """What MLX runs: a call, or a layer with the rest and the rest of a prefill, of maybe fewer tokens."""

    whole: Run | None = None
    layer_and_rest: Run | None = None
    rest: Run | None = None
    tokens: int = PROMPT

    def beside(self, ours: Run) -> tuple[float, Timing, dict[str, float]]:
        """Its seconds, ours around it, and what was measured of it."""
        if self.whole:
            timing, once = around(ours, self.whole)
            return once, timing, {"once": rounded(once)}
        assert self.layer_and_rest
        assert self.rest
        rest = min(seconds_of(self.rest) for _ in range(3))
        timing, both = around(ours, self.layer_and_rest)
        layer = (both - rest) * PROMPT / self.tokens
        total = rest + SHAPE.layers * layer
        seconds = {"one layer": rounded(layer), "rest": rounded(rest), "tokens": self.tokens}
        return total, timing, seconds | {"calculated": rounded(total)}


def rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def rows(
    what: str, dtype: mx.Dtype, ours: dict[int | None, Run], others: dict[str, Run], mlx: Mlx | None
) -> list[dict[str, Any]]:
    """The rows of a step, one for each number of bits. All contestants run in turn; a decode is a round of tokens."""
    tokens, calls = (1, TOKENS_A_ROUND) if what == "decode" else (PROMPT, 1)
    timings = measure({label(bits): run for bits, run in ours.items()} | others, rounds=11, budget_seconds=20)
    once, beside, seconds_of_mlx = mlx.beside(ours[None]) if mlx else (0.0, None, {})
    lines = []
    for bits in ours:
        own = timings[label(bits)]
        speedup = {name: round(ratio(timings[name], own), 3) for name in others if name != READ}
        seconds: dict[str, Any] = {"ours": as_json(per_token(own, calls))}
        seconds |= {name: as_json(per_token(timings[name], calls)) for name in others}
        if beside and bits is None:
            speedup["MLX"] = round(once / (beside.median / calls), 1)
            seconds |= {"MLX": seconds_of_mlx, "ours, beside MLX": as_json(per_token(beside, calls))}
        line = {"op": what, "dtype": dtype_name(dtype), "activation_bits": bits, "tokens": tokens}
        line["tokens_per_second"] = round(tokens / seconds["ours"]["median"], 1)
        if READ in others:
            line["share_of_read"] = round(ratio(timings[READ], own), 3)
        lines.append(line | {"speedup": speedup, "seconds": seconds})
    return lines


def label(bits: int | None) -> str:
    return "ours" if bits is None else f"ours, {bits} bits"


def per_token(timing: Timing, calls: int) -> Timing:
    return Timing.of([seconds / calls for seconds in timing.rounds])


def huge_pages(size: int) -> np.ndarray[Any, Any]:
    """As many bytes, to read."""
    source = mx.ones(size // 4)
    use_huge_pages(source)
    return np.asarray(source)


def read_of(model: Any) -> Run:
    """Reads as many bytes as a token does, as often as a round has tokens. Of the embedding it needs one row."""
    arrays: Any = tree_flatten(model.parameters())
    memory = huge_pages(sum(array.nbytes for name, array in arrays if "embed_tokens" not in name))
    return lambda: [_ext._read(memory) for _ in range(TOKENS_A_ROUND)]


def rows_of_dtype(dtype: mx.Dtype, llama: Any, with_mlx: bool) -> list[dict[str, Any]]:
    plain = random_llama(SHAPE, dtype)
    exact = patched_twin(plain, repack=True)
    for model in (plain, exact):
        use_huge_pages(model)
    bits = (16, 8) if dtype == mx.float32 else (8,)
    ours = {None: exact} | {b: patched_twin(exact, activation_bits=b) for b in bits}
    prompt, token = random_tokens(SHAPE, PROMPT), random_tokens(SHAPE, 1)
    of_mlx: tuple[Mlx | None, Mlx | None] = None, None
    if with_mlx:
        some = 8 if dtype == mx.float16 else PROMPT
        parts = prefill(layers_of(plain, 1), prompt[:, :some]), head_only(plain, prompt)
        of_mlx = Mlx(None, *parts, some), Mlx(decode_step(plain, token))
    # The prefill of llama.cpp first: its decode goes on behind it.
    of_llama = (
        ({LLAMA: lambda: llama.prefill(PROMPT)}, {LLAMA: lambda: llama.decode(PROMPT, TOKENS_A_ROUND)})
        if llama
        else ({}, {})
    )
    prefills = {b: prefill(model, prompt) for b, model in ours.items()}
    decodes = {b: generation(model, token, TOKENS_A_ROUND, PROMPT) for b, model in ours.items()}
    return [
        *rows("prefill", dtype, prefills, of_llama[0], of_mlx[0]),
        *rows("decode", dtype, decodes, of_llama[1] | {READ: read_of(exact)}, of_mlx[1]),
    ]


def table(lines: list[dict[str, Any]]) -> Table:
    result = console_table(
        "4-bit Llama, CPU: tokens a second, times faster than others, and the time of a read over ours",
        words=("", "dtype", "bits"),
        figures=("tokens/s", "spread", "over MLX", "over llama.cpp", "of read"),
    )
    for line in lines:
        ours, speedup = line["seconds"]["ours"], line["speedup"]
        spread = f"{(ours['high'] - ours['low']) / ours['median']:.0%}"
        cells = [line["op"], line["dtype"], str(line["activation_bits"] or ""), f"{line['tokens_per_second']}", spread]
        cells.append(f"{speedup['MLX']:.0f}" if "MLX" in speedup else "")
        cells.append(f"{speedup[LLAMA]:.2f}" if LLAMA in speedup else "")
        cells.append(f"{line['share_of_read']:.2f}" if "share_of_read" in line else "")
        result.add_row(*cells)
    return result


def other_rows(names: set[str]) -> list[dict[str, Any]]:
    """Those of the file for other dtypes."""
    path = RESULTS / f"{NAME}.json"
    if not path.exists():
        return []
    return [line for line in json.loads(path.read_text())["rows"] if line["dtype"] not in names]


@click.command()
@click.option("--dtype", "names", multiple=True, type=click.Choice([dtype_name(d) for d in DTYPES]), help="Only these.")
@click.option("--without-llama-cpp", is_flag=True)
@click.option("--without-mlx", is_flag=True, help="It takes minutes.")
def main(names: tuple[str, ...], without_llama_cpp: bool, without_mlx: bool) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.set_default_device(mx.cpu)
    console = Console(width=120)
    dtypes = [d for d in DTYPES if not names or dtype_name(d) in names]
    with tempfile.TemporaryDirectory() as folder:
        llama = None
        more = {}
        if not without_llama_cpp:
            from gguf_files import write
            from gguf_llama import LlamaCpp

            path = Path(folder) / "llama.gguf"
            write(path, SHAPE)
            llama = LlamaCpp(path, _ext._max_threads())
            more[LLAMA] = llama.system
        lines = [line for dtype in dtypes for line in rows_of_dtype(dtype, llama, not without_mlx)]
        if llama:
            llama.close()
    console.print(table(lines))
    console.print(f"written: {write_results(NAME, lines + other_rows({dtype_name(d) for d in dtypes}), **more)}")


if __name__ == "__main__":
    main()

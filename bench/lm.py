"""Generating text on the CPU: a 4-bit Llama of mlx-lm as it is, after mlx_anvil.patch, and one in llama.cpp beside it.

    python bench/lm.py [--dtype bfloat16] [--without-llama-cpp]

writes bench/results/lm_cpu.json; rows of dtypes that were not asked for stay in it. 16 layers, hidden 2048,
intermediate 5632, 32/8 heads, vocabulary 32000; random weights, 4 bits in groups of 64 (llama.cpp: Q4_0, the same 4.5
bits a weight).

Decode: one token behind 64 others, the next one chosen; a round is 32 of them one after another. Prefill: 64 tokens
into an empty cache, logits of the last. Both are timed around the model, as speed tests of language models are: without
a tokenizer, and greedy.

MLX alone is slow enough to be timed once, between calls of ours: the ratio is to the median of those. Of a prefill it
runs one layer and all that is not a layer (embedding, last norm, output head); the time of the model is taken to be the
latter and 16 times the former. In float16 that layer gets 8 of the 64 tokens, and counts 8 times more.
"""

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import RESULTS, Timing, as_json, console_table, measure, ratio, write_results

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_anvil import _ext
from mlx_anvil._check import dtype_name
from mlx_anvil.bench.model import LlamaShape, decode_step, prefill, random_llama, random_tokens
from mlx_anvil.bench.random_weights import patched_twin
from mlx_anvil.bench.timing import seconds_of
from mlx_anvil.reference import DTYPES

SHAPE = LlamaShape(hidden=2048, layers=16, intermediate=5632, heads=32, kv_heads=8, vocabulary=32000)
PROMPT = 64
# A decoder gets faster over the first tokens after anything else ran: one token by itself says little of generating.
TOKENS_A_ROUND = 32
NAME = "lm_cpu"
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


def tokens_one_by_one(step: Run) -> Run:
    return lambda: [step() for _ in range(TOKENS_A_ROUND)]


def row(
    what: str,
    dtype: mx.Dtype,
    tokens: int,
    ours: Run,
    mlx: Run | dict[str, Run],
    llama: Run | None,
    mlx_tokens: int = PROMPT,
) -> dict[str, Any]:
    """One line; `llama` makes all tokens of a round. `mlx` is one call, or the parts of one, maybe of fewer
    tokens: a layer with the rest, and the rest."""
    calls = TOKENS_A_ROUND if tokens == 1 else 1
    contestants = {"ours": tokens_one_by_one(ours) if tokens == 1 else ours} | ({"llama.cpp": llama} if llama else {})
    timings = {
        label: Timing.of([seconds / calls for seconds in timing.rounds])
        for label, timing in measure(contestants, rounds=9, budget_seconds=10).items()
    }
    seconds: dict[str, Any] = {label: as_json(timing) for label, timing in timings.items()}
    speedup = {"llama.cpp": round(ratio(timings["llama.cpp"], timings["ours"]), 3)} if llama else {}
    if callable(mlx):
        beside, once = around(ours, mlx)
        seconds["MLX"] = {"once": float(f"{once:.4g}")}
    else:
        rest = min(seconds_of(mlx["rest"]) for _ in range(3))
        beside, one_layer = around(ours, mlx["one layer and the rest"])
        layer = (one_layer - rest) * PROMPT / mlx_tokens
        once = rest + SHAPE.layers * layer
        seconds["MLX"] = {key: float(f"{s:.4g}") for key, s in (("one layer", layer), ("rest", rest))}
        seconds["MLX"]["tokens"] = mlx_tokens
        seconds["MLX"]["calculated"] = float(f"{once:.4g}")
    seconds["ours, beside MLX"] = as_json(beside)
    speedup["MLX"] = round(once / beside.median, 1)
    rate = round(tokens / seconds["ours"]["median"], 1)
    identity = {"op": what, "dtype": dtype_name(dtype), "tokens": tokens, "tokens_per_second": rate}
    return identity | {"speedup": speedup, "seconds": seconds}


def rows(dtype: mx.Dtype, llama: Any) -> list[dict[str, Any]]:
    plain = random_llama(SHAPE, dtype)
    ours = patched_twin(plain)
    prompt, token = random_tokens(SHAPE, PROMPT), random_tokens(SHAPE, 1)
    mlx_tokens = 8 if dtype == mx.float16 else PROMPT
    prefill_parts = {
        "one layer and the rest": prefill(layers_of(plain, 1), prompt[:, :mlx_tokens]),
        "rest": head_only(plain, prompt),
    }
    # The prefill of llama.cpp first: its decode goes on behind it.
    llama_runs = (
        (lambda: llama.prefill(PROMPT), lambda: llama.decode(PROMPT, TOKENS_A_ROUND)) if llama else (None, None)
    )
    return [
        row("prefill", dtype, PROMPT, prefill(ours, prompt), prefill_parts, llama_runs[0], mlx_tokens),
        row("decode", dtype, 1, decode_step(ours, token), decode_step(plain, token), llama_runs[1]),
    ]


def table(lines: list[dict[str, Any]]) -> Table:
    result = console_table(
        "4-bit Llama, CPU: tokens a second, and times faster than others",
        words=("", "dtype"),
        figures=("tokens/s", "spread", "over MLX", "over llama.cpp"),
    )
    for line in lines:
        ours, speedup = line["seconds"]["ours"], line["speedup"]
        spread = f"{(ours['high'] - ours['low']) / ours['median']:.0%}"
        beside = f"{speedup['llama.cpp']:.2f}" if "llama.cpp" in speedup else ""
        figures = (f"{line['tokens_per_second']}", spread, f"{speedup['MLX']:.0f}", beside)
        result.add_row(line["op"], line["dtype"], *figures)
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
def main(names: tuple[str, ...], without_llama_cpp: bool) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.set_default_device(mx.cpu)
    console = Console(width=120)
    dtypes = [d for d in DTYPES if not names or dtype_name(d) in names]
    with tempfile.TemporaryDirectory() as folder:
        llama = None
        more = {}
        if not without_llama_cpp:
            from gguf_llama import LlamaCpp, write

            path = Path(folder) / "llama.gguf"
            write(path, SHAPE)
            llama = LlamaCpp(path, _ext._max_threads())
            more["llama.cpp"] = llama.system
        lines = [line for dtype in dtypes for line in rows(dtype, llama)]
        if llama:
            llama.close()
    console.print(table(lines))
    console.print(f"written: {write_results(NAME, lines + other_rows({dtype_name(d) for d in dtypes}), **more)}")


if __name__ == "__main__":
    main()

"""Steps of eight sequences in mlx-lm's BatchKVCache on the CPU: a Llama as it is, after mlx_anvil.patch, and patched
with the mask as an array, which mlx-lm makes of the padding on the left.

    python bench/batch_caches.py

writes bench/results/batch_caches_cpu.json. Two layers, hidden 1024, 16 query heads over 4 key heads of 64, random
4-bit weights. The sequences have the lengths of bench/ragged_attention.py, 64 to 4096 tokens. "Prefill" is 16 tokens of each
behind them. The peak is memory beyond weights and caches.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

from harness import comparison, console_table, peak_bytes, write_results

import click
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache
from rich.console import Console

from mlx_anvil.bench.model import LlamaShape, random_llama
from mlx_anvil.bench.random_weights import patched_twin
from mlx_anvil.patching._masks import CausalMask
from ragged_attention import CACHES

SHAPE = LlamaShape(hidden=1024, layers=2, intermediate=2048, heads=16, kv_heads=4, vocabulary=4096)
STEPS = {"decode": 1, "prefill": 16}
Call = Callable[[], None]


def filled_caches(dtype: mx.Dtype) -> list[BatchKVCache]:
    longest, dim = max(CACHES), SHAPE.hidden // SHAPE.heads
    caches = []
    for _ in range(SHAPE.layers):
        cache = BatchKVCache([longest - length for length in CACHES])
        k, v = (mx.random.normal((len(CACHES), SHAPE.kv_heads, longest, dim)).astype(dtype) for _ in range(2))
        cache.update_and_fetch(k, v)
        mx.eval(cache.state)
        caches.append(cache)
    return caches


def step(model: nn.Module, caches: list[BatchKVCache], count: int) -> Call:
    tokens = mx.random.randint(0, SHAPE.vocabulary, (len(CACHES), count))
    mx.eval(tokens)

    def call() -> None:
        mx.eval(model(tokens, cache=caches)[:, -1])
        for cache in caches:
            cache.trim(count)

    return call


def with_arrays(call: Call) -> Call:
    def with_array() -> None:
        with mock.patch.object(CausalMask, "options", lambda mask, *_: {"mask": mask}):
            call()

    return with_array


def rows(dtype: mx.Dtype, rounds: int) -> list[dict[str, Any]]:
    plain = random_llama(SHAPE, dtype)
    ours, caches = patched_twin(plain), filled_caches(dtype)
    found = []
    for what, count in STEPS.items():
        if count > 1 and dtype != mx.float32:
            continue  # MLX's products in 16 bits take minutes
        patched = step(ours, caches, count)
        contestants = {"ours": patched, "a mask": with_arrays(patched), "MLX": step(plain, caches, count)}
        peaks = {label: peak_bytes(call) for label, call in contestants.items()}
        shape = (len(CACHES), count, max(CACHES))
        found.append(comparison(what, dtype, shape, contestants, rounds=rounds, budget_seconds=5, peak_bytes=peaks))
    return found


@click.command()
@click.option("--rounds", default=3, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    found = [row for dtype in (mx.float32, mx.bfloat16) for row in rows(dtype, rounds)]
    labels = ("ours", "a mask", "MLX")
    table = console_table(
        "eight sequences, CPU", words=("step", "dtype"), figures=(*labels, *(f"{label} MiB" for label in labels))
    )
    for row in found:
        times = (f"{row['seconds'][label]['median'] * 1e3:.1f} ms" for label in labels)
        table.add_row(row["op"], row["dtype"], *times, *(f"{row['peak_bytes'][x] / 2**20:.1f}" for x in labels))
    Console().print(table)
    print(f"written: {write_results('batch_caches_cpu', found)}")


if __name__ == "__main__":
    main()

"""Decode and prefill over a KV cache that is split over processes, beside one process with mlx-lm's cache.

    python bench/sharded_cache.py

writes bench/results/sharded_cache_cpu.json. It starts 1, 2 and 4 processes of one thread each, which exchange over
MLX's ring backend on this machine. Four layers, hidden 1024, 16 query heads over 4 key heads of 64, random 4-bit
weights, bfloat16, after mlx_anvil.patch. "Decode" is a token after 32768 others. "Attention" is decode_attention alone,
over those tokens of one layer. "Prefill" is a prompt of 4096 tokens in steps of 2048, of all processes together.

"Work" is a step in which every process merges copies of its own results. "Comm" is what the step exchanges, alone;
their sum is not the time of a step, in which processes also wait for each other. "Ideal" is the rate of work as a share
of the best: as if the attention of one process took 1/n, and all else as long as in one.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from harness import console_table, write_results

import click
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console

import mlx_anvil
from mlx_anvil import distributed
from mlx_anvil.bench.model import LlamaShape, random_llama
from mlx_anvil.bench.timing import seconds_of
from mlx_anvil.distributed import _local

SHAPE = LlamaShape(hidden=1024, layers=4, intermediate=2816, heads=16, kv_heads=4, vocabulary=4096)
HEAD_DIM = SHAPE.hidden // SHAPE.heads
DTYPE = mx.bfloat16
PROCESSES = (1, 2, 4)
SECONDS = 600  # after which processes are killed
Call = Callable[[], Any]


def normal(*shape: int) -> mx.array:
    x = mx.random.normal(shape).astype(DTYPE)
    mx.eval(x)
    return x


def timed(call: Call, repeats: int) -> float:
    """The median of some calls, after two."""
    call()
    call()
    return statistics.median(seconds_of(call) for _ in range(repeats))


def kv(length: int) -> list[mx.array]:
    return [normal(1, SHAPE.kv_heads, length, HEAD_DIM) for _ in range(2)]


def of_one(length: int, prompt: int, repeats: int) -> dict[str, Any]:
    """Seconds and bytes of one process with mlx-lm's cache."""
    model = patched_model()
    cache = make_prompt_cache(model)
    for layer in cache:
        layer.update_and_fetch(*kv(length))
    mx.eval([layer.state for layer in cache])
    token = mx.array([[1]])

    def decode() -> None:
        mx.eval(model(token, cache=cache))
        for layer in cache:
            layer.trim(1)

    def prefill() -> None:
        new = make_prompt_cache(model)
        tokens = mx.random.randint(0, SHAPE.vocabulary, (1, prompt))
        for begin in range(0, prompt, 2048):
            model(tokens[:, begin : begin + 2048], cache=new)
            mx.eval([layer.state for layer in new])

    q, keys, values = normal(1, SHAPE.heads, 1, HEAD_DIM), *kv(length)
    return {
        "decode": timed(decode, repeats),
        "attention": timed(lambda: mx.eval(mlx_anvil.flash_attention(q, keys, values)), repeats),
        "prefill": timed(prefill, 1),
        "prefill peak": peak(prefill),
        "cache": sum(layer.nbytes for layer in cache),
    }


def of_rank(length: int, prompt: int, repeats: int) -> dict[str, Any]:
    """The same of a process of a group, and of its work and its exchanges alone."""
    model, group = patched_model(), mx.distributed.init()
    cache = distributed.make_sharded_cache(model, group)
    for layer in cache:
        layer.split_next(length)
        layer.update_and_fetch(*kv(length // group.size()))
    mx.eval([layer.state for layer in cache])
    token = mx.array([[1]])

    def decode() -> None:
        mx.eval(model(token, cache=cache))
        for layer in cache:
            layer.trim(1)

    def prefill() -> None:
        new = distributed.make_sharded_cache(model, group)
        tokens = mx.ones((1, prompt), mx.int32)
        mx.eval(distributed.prefill(model, tokens, new, step_size=2048 // group.size()))

    message = normal(1, 1, SHAPE.heads, 1, HEAD_DIM + 2)

    def exchange(times: int) -> None:
        parts = message
        for _ in range(times):
            parts = mx.distributed.all_gather(mx.depends([message], [parts])[0], group=group)
        mx.eval(parts)

    q, keys, values = normal(1, SHAPE.heads, 1, HEAD_DIM), *kv(length // group.size())
    attention = partial(distributed.decode_attention, q, keys, values, group=group)
    found: dict[str, Any] = {
        "decode": timed(decode, repeats),
        "decode exchange": timed(partial(exchange, SHAPE.layers), repeats),
        "attention": timed(lambda: mx.eval(attention()), repeats),
        "attention exchange": timed(partial(exchange, 1), repeats),
        "prefill": timed(prefill, 1),
        "prefill peak": peak(prefill),
        "cache": sum(layer.nbytes for layer in cache),
    }
    with mock.patch.object(mx.distributed, "all_gather", lambda x, group: mx.concatenate([x] * group.size())):
        found["decode work"] = timed(decode, repeats)
        found["attention work"] = timed(lambda: mx.eval(attention()), repeats)
    mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))  # a process that ends would break the others' ring
    return found


def patched_model() -> Any:
    mx.random.seed(1)
    model = random_llama(SHAPE, DTYPE)
    mlx_anvil.patch(model)
    return model


def peak(call: Call) -> int:
    """The most memory of a call beyond what is held before."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    call()
    return mx.get_peak_memory() - before


def rows(length: int, prompt: int, repeats: int, rounds: int) -> list[dict[str, Any]]:
    """Starts the processes of each number ``rounds`` times, in alternating order."""
    found: dict[int, list[list[dict[str, Any]]]] = {count: [] for count in PROCESSES}
    for round_ in range(rounds):
        for count in PROCESSES if round_ % 2 == 0 else reversed(PROCESSES):
            function = of_one if count == 1 else of_rank
            options = {"seconds": SECONDS, "environment": _local.ONE_THREAD, "apart": True}
            found[count].append(_local.results(function, count, length, prompt, repeats, **options))
    one = {key: median_of_slowest(found[1], key) for key in found[1][0][0]}
    return [
        row_of(what, count, found[count], one) for what in ("decode", "attention", "prefill") for count in PROCESSES
    ]


def median_of_slowest(runs: list[list[dict[str, Any]]], key: str) -> float:
    """Of the runs; in each, of the process that took longest."""
    return statistics.median(max(rank[key] for rank in run) for run in runs)


def row_of(what: str, count: int, runs: list[list[dict[str, Any]]], one: dict[str, float]) -> dict[str, Any]:
    keys = [key for key in runs[0][0] if key.startswith(what)]
    row: dict[str, Any] = {"op": what, "processes": count}
    if what == "decode":
        row["cache_bytes"] = median_of_slowest(runs, "cache")
    row |= {key.removeprefix(what).strip() or "seconds": median_of_slowest(runs, key) for key in keys}
    row["speedup"] = one[what] / row["seconds"]
    if "work" in row:
        split = one["attention"] * (SHAPE.layers if what == "decode" else 1)
        row["ideal"] = one[what] - split + split / count
        row["of_ideal"] = row["ideal"] / row["work"]
    return row


@click.command()
@click.option("--length", default=32768, help="Tokens in the cache of a decode.")
@click.option("--prompt", default=4096, help="Tokens of a prefill.")
@click.option("--repeats", default=30, help="Calls that are timed.")
@click.option("--rounds", default=2, help="How often each number of processes is started.")
def main(length: int, prompt: int, repeats: int, rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    found = rows(length, prompt, repeats, rounds)
    figures = ("n", "ms", "speedup", "work", "comm", "ideal", "cache", "peak")
    table = console_table("a cache over n processes of one thread; ms, MiB", words=("step",), figures=figures)

    def shown(row: dict[str, Any], key: str, factor: float, digits: int) -> str:
        return f"{row[key] * factor:.{digits}f}" if key in row else ""

    for row in found:
        times = [shown(row, key, 1e3, 2) for key in ("work", "exchange")]
        mebibytes = [shown(row, key, 2**-20, 0) for key in ("cache_bytes", "peak")]
        head = (row["op"], str(row["processes"]), shown(row, "seconds", 1e3, 2), shown(row, "speedup", 1, 2))
        table.add_row(*head, *times, shown(row, "of_ideal", 1, 2), *mebibytes)
    Console(width=80).print(table)
    print(f"written: {write_results('sharded_cache_cpu', found, length=length, prompt=prompt)}")


if __name__ == "__main__":
    main()

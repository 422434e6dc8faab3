"""Tensor parallelism on the CPU: a 4-bit Llama split over 1, 2 and 4 processes of one thread each.

    python bench/tensor_parallel.py [--dtype bfloat16] [--processes 2]...

writes bench/results/tensor_parallel_cpu.json. 8 layers, hidden 2048, intermediate 5632, 32/8 heads, vocabulary 32000;
random weights, 4 bits in groups of 64. Every process patches the model and splits it by ``distributed.shard(model,
head=True)``.

Decode: one token behind 64 others; a round is 16 of them, one after another. Prefill: 512 tokens into an empty cache.
Rounds alternate between the model as it is and the same model without communication: its layers get a group of one
process, whose sums return their argument and whose logits are its own part. All processes run each round at the same
time, and the slowest one counts. What is left when the second is taken from the first is communication, waiting for
each other included.

Not divided are the embedding, the norms and residual sums; they are timed alone too. "One" is the whole model in one
process. Processes that compute at the same time share caches, memory and clock, so each of them runs it, at the same
time, in the same rounds. The ideal of n processes is the time of what is not divided, and the n-th part of the rest of
one.

The second table is the product and sum of one row-sharded projection of a prefill, in 1, 2 and 4 chunks of rows.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness import Timing, as_json, console_table, slowest, write_results

import click
import mlx.core as mx
import mlx.nn as nn
from rich.console import Console
from rich.table import Table

import mlx_anvil
from mlx_anvil import distributed
from mlx_anvil._check import dtype_name
from mlx_anvil.bench.model import LlamaShape, decode_step, prefill, random_llama, random_tokens
from mlx_anvil.bench.random_weights import BITS, GROUP_SIZE, quantized_linear
from mlx_anvil.distributed import _local
from mlx_anvil.reference import DTYPES

SHAPE = LlamaShape(hidden=2048, layers=8, intermediate=5632, heads=32, kv_heads=8, vocabulary=32000)
TOKENS = {"prefill": 512, "decode": 1}
TOKENS_A_ROUND = 16  # of a decode
ROUNDS = 5
ROWS = (512, 2048)  # of the projection
CHUNKS = (1, 2, 4)
SECONDS = 900  # until processes that hang are killed
Run = Callable[[], Any]


# ---- in each process -------------------------------------------------------------------------------------------------


class _OneProcess:
    """A group of this process alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@contextmanager
def without_communication(model: nn.Module) -> Iterator[None]:
    layers = [module for module in model.modules() if hasattr(module, "group")]
    groups, alone = [layer.group for layer in layers], _OneProcess()
    for layer in layers:
        layer.group = alone
    try:
        yield
    finally:
        for layer, group in zip(layers, groups, strict=True):
            layer.group = group


def rounds_of(contestants: dict[str, Run], count: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of rounds that all processes begin together. The number is fixed, or they would wait for each other."""
    group, seconds = mx.distributed.init(), {label: [] for label in contestants}
    order = list(contestants)
    for index in range(1 + count):
        for label in order if index % 2 == 0 else reversed(order):
            mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))
            begin = time.perf_counter()
            contestants[label]()
            if index:  # the first warms up
                seconds[label].append(time.perf_counter() - begin)
    return seconds


def repeated(step: Run) -> Run:
    return lambda: [step() for _ in range(TOKENS_A_ROUND)]


def undivided(model: Any, tokens: mx.array) -> Run:
    """Embedding, norms and residual sums."""

    def run() -> None:
        hidden = model.model.embed_tokens(tokens)
        for layer in model.layers:
            hidden = hidden + layer.input_layernorm(hidden)
            hidden = hidden + layer.post_attention_layernorm(hidden)
        mx.eval(model.model.norm(hidden))

    return run


def steps_of_model(dtype: mx.Dtype) -> dict[str, dict[str, list[float]]]:
    group = mx.distributed.init()
    mx.random.seed(1)
    model, alone = random_llama(SHAPE, dtype), random_llama(SHAPE, dtype)
    tokens = {what: random_tokens(SHAPE, count) for what, count in TOKENS.items()}
    mlx_anvil.patch(model)
    mlx_anvil.patch(alone)
    distributed.shard(model, group, head=True)
    mx.eval(model.parameters(), alone.parameters())
    mx.clear_cache()
    found = {}
    for what, step in (("prefill", prefill), ("decode", decode_step)):
        runs = [step(model, tokens[what]), step(alone, tokens[what]), undivided(model, tokens[what])]
        run, one, rest = runs if what == "prefill" else map(repeated, runs)

        def compute(run: Run = run) -> None:
            with without_communication(model):
                run()

        with mlx_anvil.strict():
            found[what] = rounds_of({"whole": run, "compute": compute, "one": one, "undivided": rest})
    return found


def sums_of_projection(dtype: mx.Dtype) -> dict[str, dict[str, list[float]]]:
    """The down projection's product and sum."""
    group = mx.distributed.init()
    found = {}
    for rows in ROWS:
        layer = quantized_linear(SHAPE.intermediate // group.size(), SHAPE.hidden, dtype)
        x = mx.random.normal((rows, SHAPE.intermediate // group.size())).astype(dtype)
        y = mx.random.normal((rows, SHAPE.hidden)).astype(dtype)
        matrix = layer["weight"], layer["scales"], layer["biases"]
        options = {"group_size": GROUP_SIZE, "bits": BITS}
        mx.eval(x, y, matrix)

        def chunked(chunks: int, x: mx.array = x, matrix: Any = matrix, options: Any = options) -> Run:
            return lambda: mx.eval(
                distributed.quantized_matmul_all_sum(x, *matrix, group=group, chunks=chunks, **options)
            )

        contestants: dict[str, Run] = {
            "product": lambda x=x, matrix=matrix, options=options: mx.eval(
                mlx_anvil.quantized_matmul(x, *matrix, **options)
            ),
            "sum": lambda y=y: mx.eval(mx.distributed.all_sum(y, group=group)),
        }
        found[str(rows)] = rounds_of(contestants | {str(count): chunked(count) for count in CHUNKS})
    return found


def measured(dtype: str) -> dict[str, Any]:
    result: dict[str, Any] = {"model": steps_of_model(getattr(mx, dtype))}
    if mx.distributed.init().size() > 1:
        result["projection"] = sums_of_projection(getattr(mx, dtype))
    return result


# ---- in the process that starts them ---------------------------------------------------------------------------------


def model_rows(dtype: str, of_processes: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for what in TOKENS:
        calls = TOKENS_A_ROUND if what == "decode" else 1

        def timing(processes: int, label: str, what: str = what, calls: int = calls) -> Timing:
            return slowest([rank["model"][what][label] for rank in of_processes[processes]], calls)

        for processes in of_processes:
            whole, compute = timing(processes, "whole"), timing(processes, "compute")
            one, rest = timing(processes, "one").median, timing(processes, "undivided").median
            ideal = rest + (one - rest) / processes
            rows.append(
                {
                    "op": what,
                    "dtype": dtype,
                    "processes": processes,
                    "seconds": {"whole": as_json(whole), "compute": as_json(compute), "one": one, "ideal": ideal},
                    "communication": statistics.median(
                        w - c for w, c in zip(whole.rounds, compute.rounds, strict=True)
                    ),
                    "of_ideal": round(ideal / compute.median, 3),
                    "of_nth": round(one / processes / compute.median, 3),
                    "undivided": rest,
                }
            )
    return rows


def projection_rows(dtype: str, of_processes: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for processes, of_ranks in of_processes.items():
        for count in ROWS if processes > 1 else ():
            labels = of_ranks[0]["projection"][str(count)]
            timings = {
                label: as_json(slowest([rank["projection"][str(count)][label] for rank in of_ranks]))
                for label in labels
            }
            rows.append({"op": "projection", "dtype": dtype, "processes": processes, "rows": count, "seconds": timings})
    return rows


def table_of_model(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "4-bit Llama, n processes of one thread: milliseconds of the slowest",
        words=("", "n"),
        figures=("whole", "compute", "rest", "one", "ideal", "of ideal", "of 1/n"),
    )
    for row in rows:
        seconds = row["seconds"]
        medians = [seconds["whole"]["median"], seconds["compute"]["median"]]
        figures = [*medians, row["communication"], seconds["one"], seconds["ideal"]]
        shares = [f"{row[key]:.2f}" for key in ("of_ideal", "of_nth")]
        result.add_row(row["op"], str(row["processes"]), *(f"{1e3 * s:.4g}" for s in figures), *shares)
    return result


def table_of_projection(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        f"Product {SHAPE.intermediate}/n x {SHAPE.hidden} and sum, milliseconds",
        words=("processes", "rows"),
        figures=("product", "sum", *(f"in {count}" for count in CHUNKS)),
    )
    for row in rows:
        figures = (f"{1e3 * timing['median']:.4g}" for timing in row["seconds"].values())
        result.add_row(str(row["processes"]), str(row["rows"]), *figures)
    return result


@click.command(help=__doc__.partition("\n")[0])
@click.option("--dtype", type=click.Choice([dtype_name(d) for d in DTYPES]), default="bfloat16")
@click.option("--processes", type=int, multiple=True, default=(2, 4), help="Numbers of processes beside one.")
def main(dtype: str, processes: tuple[int, ...]) -> None:
    options = {"seconds": SECONDS, "environment": _local.ONE_THREAD, "apart": True}
    of_processes = {count: _local.results(measured, count, dtype, **options) for count in sorted({1, *processes})}
    of_model, of_projection = model_rows(dtype, of_processes), projection_rows(dtype, of_processes)
    console = Console(width=80)
    console.print(table_of_model(of_model))
    console.print(table_of_projection(of_projection))
    path = write_results("tensor_parallel_cpu", of_model + of_projection, shape=str(SHAPE), threads_a_process=1)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()

"""Ours beside MLX on a busy CPU: every op small and large, and decoding, while other processes want the cores.

    python bench/busy.py [--condition NAME]...

writes bench/results/busy_cpu.json. A condition is a process of its own, so that each starts with new threads. In it,
calls of ours and of MLX's op alternate until the time of a row is over. Figures are the median and the 90th percentile
of single calls, each waited for. "nice" gives this process, ours and MLX's calls alike, a lower priority than the two
others.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness import console_table, write_results

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

import mlx_anvil
from mlx_anvil.bench import model
from mlx_anvil.bench.random_weights import patched_twin
from mlx_anvil.bench.timing import seconds_of

# name: processes that keep a core busy, niceness of this process
CONDITIONS = {"idle": (0, 0), "1 other": (1, 0), "2 others": (2, 0), "2 others, nice": (2, 10)}
# Calls of one side before it is the other's turn: long beside the turns that the kernel gives to processes, or one side
# would wait for the cores that the other has used up.
BURST_SECONDS = 0.25
Run = Callable[[], Any]


def _normal(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def _quantized(outputs: int, inputs: int) -> tuple[mx.array, ...]:
    arrays = mx.quantize(_normal(outputs, inputs), group_size=64, bits=4)
    mx.eval(arrays)
    return tuple(arrays)


def _silu_gate(rows: int, columns: int) -> tuple[Run, Run]:
    gate, up = _normal(rows, columns), _normal(rows, columns)
    return lambda: mlx_anvil.silu_gate(gate, up), lambda: gate * mx.sigmoid(gate) * up


def _norm(rows: int, columns: int) -> tuple[Run, Run]:
    x, weight = _normal(rows, columns, dtype=mx.float32), _normal(columns, dtype=mx.float32)
    return lambda: mlx_anvil.rms_norm(x, weight, 1e-5), lambda: mx.fast.rms_norm(x, weight, 1e-5)


def _layer_norm(rows: int, columns: int) -> tuple[Run, Run]:
    x, weight, bias = _normal(rows, columns), _normal(columns), _normal(columns)
    return lambda: mlx_anvil.layer_norm(x, weight, bias, 1e-5), lambda: mx.fast.layer_norm(x, weight, bias, 1e-5)


def _rope(heads: int, length: int) -> tuple[Run, Run]:
    x = _normal(1, heads, length, 128)
    options: dict[str, Any] = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": 77}
    return lambda: mlx_anvil.rope(x, 128, **options), lambda: mx.fast.rope(x, 128, **options)


def _attention(heads: int, queries: int, keys: int) -> tuple[Run, Run]:
    q = _normal(1, heads, queries, 64)
    k, v = _normal(1, heads, keys, 64), _normal(1, heads, keys, 64)
    return (
        lambda: mlx_anvil.flash_attention(q, k, v),
        lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125),
    )


def _product(rows: int, inputs: int, outputs: int) -> tuple[Run, Run]:
    x, matrix = _normal(rows, inputs), _quantized(outputs, inputs)
    return lambda: mlx_anvil.quantized_matmul(x, *matrix), lambda: mx.quantized_matmul(x, *matrix)


def _swiglu(inputs: int, outputs: int) -> tuple[Run, Run]:
    x, gate, up = _normal(1, inputs), _quantized(outputs, inputs), _quantized(outputs, inputs)

    def plain() -> mx.array:
        g, u = (mx.quantized_matmul(x, *matrix) for matrix in (gate, up))
        return g * mx.sigmoid(g) * u

    return lambda: mlx_anvil.quantized_swiglu(x, gate, up), plain


def _embedding(ids: int, dims: int) -> tuple[Run, Run]:
    matrix, chosen = _quantized(2048, dims), mx.random.randint(0, 2048, (ids,))
    mx.eval(chosen)
    return (
        lambda: mlx_anvil.quantized_embedding(chosen, *matrix),
        lambda: mx.dequantize(*(x[chosen] for x in matrix), group_size=64, bits=4),
    )


def _argmax(inputs: int, outputs: int) -> tuple[Run, Run]:
    x, matrix = _normal(1, inputs), _quantized(outputs, inputs)
    return (
        lambda: mlx_anvil.quantized_argmax(x, *matrix),
        lambda: mx.argmax(mx.quantized_matmul(x, *matrix), axis=-1),
    )


def _router(tokens: int, experts: int) -> tuple[Run, Run]:
    logits = _normal(tokens, experts)

    def plain() -> tuple[mx.array, mx.array]:
        scores = mx.softmax(logits, axis=-1, precise=True)
        chosen = mx.argpartition(scores, kth=-8, axis=-1)[..., -8:]
        return mx.take_along_axis(scores, chosen, axis=-1), chosen

    return lambda: mlx_anvil.softmax_topk(logits, 8), plain


def _decode(hidden: int, layers: int) -> tuple[Run, Run]:
    shape = model.LlamaShape(
        hidden=hidden,
        layers=layers,
        intermediate=3 * hidden,
        heads=hidden // 64,
        kv_heads=hidden // 128,
        vocabulary=1000,
    )
    plain = model.random_llama(shape, mx.bfloat16)
    tokens = model.random_tokens(shape, 1)
    ours, mlx = (model.decode_step(m, tokens) for m in (patched_twin(plain), plain))
    return ours, mlx


CASES: dict[str, Callable[[], tuple[Run, Run]]] = {
    "silu_gate 4x1024": lambda: _silu_gate(4, 1024),
    "silu_gate 512x4096": lambda: _silu_gate(512, 4096),
    "rms_norm 4x1024": lambda: _norm(4, 1024),
    "rms_norm 64x4096": lambda: _norm(64, 4096),
    "rms_norm 2048x4096": lambda: _norm(2048, 4096),
    "layer_norm 4x1024": lambda: _layer_norm(4, 1024),
    "layer_norm 512x4096": lambda: _layer_norm(512, 4096),
    "rope 8 heads, length 1": lambda: _rope(8, 1),
    "rope 32 heads, length 512": lambda: _rope(32, 512),
    "flash_attention 8x1x512": lambda: _attention(8, 1, 512),
    "flash_attention 8x256x256": lambda: _attention(8, 256, 256),
    "quantized_matmul 1x256x256": lambda: _product(1, 256, 256),
    "quantized_matmul 1x2048x2048": lambda: _product(1, 2048, 2048),
    "quantized_matmul 32x512x512": lambda: _product(32, 512, 512),
    "quantized_swiglu 512x1408": lambda: _swiglu(512, 1408),
    "quantized_embedding 4x1024": lambda: _embedding(4, 1024),
    "quantized_embedding 512x1024": lambda: _embedding(512, 1024),
    "quantized_argmax 512x8000": lambda: _argmax(512, 8000),
    "softmax_topk 1x64": lambda: _router(1, 64),
    "softmax_topk 2048x128": lambda: _router(2048, 128),
    "decode, 2 layers of 256": lambda: _decode(256, 2),
    "decode, 8 layers of 512": lambda: _decode(512, 8),
}


@contextmanager
def others(count: int) -> Iterator[None]:
    """Processes that each want a core all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5 if count else 0.0)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median and 90th percentile."""
    return {"median": statistics.median(seconds), "p90": statistics.quantiles(seconds, n=10)[-1]}


def run_case(make: Callable[[], tuple[Run, Run]], row_seconds: float) -> dict[str, Any]:
    """Single calls of both sides, in bursts that alternate."""
    sides = {label: lambda run=run: mx.eval(run()) for label, run in zip(("ours", "MLX"), make(), strict=True)}
    seconds: dict[str, list[float]] = {label: [] for label in sides}
    for run in sides.values():
        run()
    end = time.perf_counter() + row_seconds
    while time.perf_counter() < end or min(map(len, seconds.values())) < 10:
        for label, run in sides.items():
            burst = time.perf_counter() + BURST_SECONDS
            while time.perf_counter() < burst:
                seconds[label].append(seconds_of(run))
    ours, mlx = (percentiles(seconds[label]) for label in sides)
    return {"ours": ours, "MLX": mlx, "calls": {label: len(values) for label, values in seconds.items()}}


def run_condition(name: str, row_seconds: float) -> list[dict[str, Any]]:
    """Every case, in this process."""
    count, niceness = CONDITIONS[name]
    with others(count):
        os.nice(niceness)
        mx.random.seed(0)
        return [{"condition": name, "case": case} | run_case(make, row_seconds) for case, make in CASES.items()]


def table(rows: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(row["condition"] for row in rows))
    result = console_table("MLX's time over ours: median | 90th percentile", words=("",), figures=names)
    for case in CASES:
        cells = []
        for name in names:
            row = next(row for row in rows if row["condition"] == name and row["case"] == case)
            ratios = [row["MLX"][key] / row["ours"][key] for key in ("median", "p90")]
            text = " | ".join(f"{x:.1f}" if x < 10 else f"{x:.0f}" for x in ratios)
            cells.append(text if min(ratios) >= 1 else f"[red]{text}[/red]")
        result.add_row(case, *cells)
    return result


@click.command()
@click.option("--condition", "conditions", multiple=True, type=click.Choice(list(CONDITIONS)), help="Only this one.")
@click.option("--row-seconds", default=1.0, show_default=True, help="Time of each row.")
@click.option("--here", is_flag=True, hidden=True, help="Run the condition in this process; print its rows as JSON.")
def main(conditions: tuple[str, ...], row_seconds: float, here: bool) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    if here:
        print(json.dumps(run_condition(conditions[0], row_seconds)))
        return
    console = Console()
    rows = []
    for name in conditions or CONDITIONS:
        with console.status(name):
            command = [sys.executable, __file__, "--here", "--condition", name, "--row-seconds", str(row_seconds)]
            run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise click.ClickException(run.stderr)
        rows += json.loads(run.stdout)
    console.print(table(rows))
    if not conditions:
        console.print(f"written: {write_results('busy_cpu', rows)}")


if __name__ == "__main__":
    main()

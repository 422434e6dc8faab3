"""Attention over quantized keys and values on the CPU: decode and prefill beside our own float16 and MLX.

    python bench/quantized_kv.py

writes bench/results/quantized_kv_cpu.json. A decode has one query over 32768 keys, 32 query heads over 8 key heads of
128; a prefill has 2048 queries over as many keys, with a causal mask. Affine formats with groups of 64. MLX dequantizes
the cache and attends, since its attention takes arrays only; calls of more than two seconds are timed once.

Keys and values of a decode exceed the caches of most machines, so each call reads them from memory; the limit is reading
buffers of as many bytes, on all threads. Peak memory is MLX's, beyond the arrays that a call is given.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from harness import as_json, console_table, measure, peak_bytes, ratio, write_results

import click
import mlx.core as mx
import numpy as np
from rich.console import Console

from mlx_anvil import _ext, flash_attention

Call = Callable[[], Any]
Q_HEADS, KV_HEADS, HEAD_DIM, GROUP = 32, 8, 128, 64


class Problem(NamedTuple):
    name: str
    q_len: int
    kv_len: int


PROBLEMS = (Problem("decode", 1, 32768), Problem("prefill", 2048, 2048))


def quantized(x: mx.array, bits: int) -> tuple[mx.array, ...]:
    parts = tuple(mx.quantize(x, group_size=GROUP, bits=bits))
    mx.eval(parts)
    return parts


def contestants(problem: Problem, bits: int) -> tuple[dict[str, Call], dict[str, Call], int]:
    """Ours on the codes and on float16; MLX; and the bytes of the quantized keys and values."""
    shapes = [(1, Q_HEADS, problem.q_len, HEAD_DIM)] + [(1, KV_HEADS, problem.kv_len, HEAD_DIM)] * 2
    q, k, v = (mx.random.normal(shape).astype(mx.float16) for shape in shapes)
    keys, values = quantized(k, bits), quantized(v, bits)
    mx.eval(q, k, v)
    mask = "causal" if problem.q_len > 1 else None

    def of_mlx() -> mx.array:
        arrays = (mx.dequantize(*x, group_size=GROUP, bits=bits) for x in (keys, values))
        return mx.fast.scaled_dot_product_attention(q, *arrays, scale=HEAD_DIM**-0.5, mask=mask)

    ours = {
        "ours": lambda: mx.eval(flash_attention(q, keys, values, mask=mask, kv_bits=bits)),
        "float16": lambda: mx.eval(flash_attention(q, k, v, mask=mask)),
    }
    return ours, {"MLX": lambda: mx.eval(of_mlx())}, sum(x.nbytes for x in (*keys, *values))


def run(problem: Problem, bits: int, rounds: int) -> dict[str, Any]:
    ours, rivals, total_bytes = contestants(problem, bits)
    slow: dict[str, float] = {}
    for label, call in rivals.items():
        start = time.perf_counter()
        call()
        if (seconds := time.perf_counter() - start) > 2.0:
            slow[label] = seconds
    calls = ours | {label: call for label, call in rivals.items() if label not in slow}
    timings = measure(calls, rounds=rounds)
    mine = timings["ours"]
    row = {
        "op": "flash_attention",
        "direction": problem.name,
        "dtype": "float16",
        "bits": bits,
        "problem": f"{Q_HEADS}/{KV_HEADS} heads of {HEAD_DIM}, {problem.q_len} of {problem.kv_len}",
        "speedup": {
            label: round(slow[label] / mine.median if label in slow else ratio(timings[label], mine), 2)
            for label in ("float16", *rivals)
        },
        "seconds": {label: as_json(t) for label, t in timings.items()},
        "seconds_of_one_call": {label: round(seconds, 3) for label, seconds in slow.items()},
        "peak_bytes": {label: peak_bytes(call) for label, call in (ours | rivals).items()},
    }
    if problem.q_len == 1:
        buffer = np.asarray(mx.ones(total_bytes // 4))
        read = measure({"read": lambda: _ext._read(buffer)}, rounds=rounds)["read"]
        row["rate"] = f"{total_bytes / mine.median / 1e9:.1f} GB/s"
        row["limit"] = f"read {total_bytes / read.median / 1e9:.1f} GB/s"
    return row


@click.command()
@click.option("--rounds", default=15, show_default=True, help="Interleaved rounds of each measurement.")
@click.option("--write/--no-write", default=True, show_default=True, help="Whether to write the file of results.")
def main(rounds: int, write: bool) -> None:
    """Attention over quantized keys and values on the CPU."""
    mx.set_default_device(mx.cpu)
    rows = [run(problem, bits, rounds) for problem in PROBLEMS for bits in (4, 8)]
    table = console_table(
        "attention over quantized keys and values, CPU, float16 queries",
        words=("",),
        figures=("bits", "ms", "GB/s", "read", "float16", "MLX", "peak MiB", "float16's"),
    )
    for row in rows:
        table.add_row(
            row["direction"],
            str(row["bits"]),
            f"{row['seconds']['ours']['median'] * 1e3:.2f}",
            row.get("rate", "").removesuffix(" GB/s"),
            row.get("limit", "").removeprefix("read ").removesuffix(" GB/s"),
            f"{row['speedup']['float16']:.2f}x",
            f"{row['speedup']['MLX']:.0f}x",
            *(f"{row['peak_bytes'][label] / 2**20:.1f}" for label in ("ours", "float16")),
        )
    console = Console()
    console.print(table)
    console.print("float16 and MLX: how many times as fast ours is; the times are medians.")
    if write:
        write_results("quantized_kv_cpu", rows)


if __name__ == "__main__":
    main()

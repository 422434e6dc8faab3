"""rope and rope_qk on the CPU against ``mx.fast.rope`` and copying the same bytes.

    python bench/bench_rope.py

writes bench/results/rope_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS says). The share
of copy bandwidth is against the faster of memcpy and of stores past the cache, which read and write as many bytes in all;
freed memory is kept (``mx.set_cache_limit``), as a training loop would.
"""

from collections.abc import Callable
from typing import Any

import click
import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from harness import as_json, measure, ratio, write_results
from mlx_anvil import _ext, rope, rope_qk
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

# (batch, q heads, kv heads, length, head_dim): one token, a few, a prompt, a long one
SHAPES = ((1, 1, 1, 1, 64), (1, 32, 8, 1, 128), (8, 32, 8, 1, 128), (1, 32, 8, 64, 128), (1, 32, 8, 2048, 128))
REUSED_BYTES = 4 << 30


def contestants(q: mx.array, k: mx.array, traditional: bool) -> dict[str, Callable[[], None]]:
    dims = q.shape[-1]
    theirs: dict[str, Any] = {"traditional": traditional, "base": 10000.0, "scale": 1.0, "offset": 77}
    return {
        "rope": lambda: mx.eval([rope(x, dims, traditional=traditional, offset=77) for x in (q, k)]),
        "rope_qk": lambda: mx.eval(rope_qk(q, k, dims, traditional=traditional, offset=77)),
        "mx.fast.rope": lambda: mx.eval([mx.fast.rope(x, dims, **theirs) for x in (q, k)]),
    }


def copies(total_bytes: int) -> dict[str, Callable[[], None]]:
    source, target = (np.asarray(mx.ones(max(1, total_bytes // 8))) for _ in range(2))
    return {
        "copy": lambda: _ext._copy(source, target, False),
        "copy past the cache": lambda: _ext._copy(source, target, True),
    }


def run_row(shape: tuple[int, ...], dtype: mx.Dtype, traditional: bool, rounds: int) -> dict[str, Any]:
    batch, q_heads, kv_heads, length, dim = shape
    q, k = (mx.random.normal((batch, heads, length, dim)).astype(dtype) for heads in (q_heads, kv_heads))
    mx.eval(q, k)
    runs = contestants(q, k, traditional)
    total_bytes = 2 * (q.nbytes + k.nbytes)
    # Ours and the copies by themselves first: beside calls many times as long they would get few rounds.
    alone = measure(copies(total_bytes) | {"rope_qk": runs["rope_qk"]}, rounds=2 * rounds + 1, budget_seconds=0.5)
    copy = min((alone["copy"], alone["copy past the cache"]), key=lambda t: t.median)
    beside = measure(runs, rounds=rounds, budget_seconds=0.5)
    return {
        "op": "rope",
        "order": "traditional" if traditional else "halves",
        "dtype": dtype_name(dtype),
        "shape": list(shape),
        "bytes": total_bytes,
        "share_of_copy": round(ratio(copy, alone["rope_qk"]), 3),
        "speedup": {label: round(ratio(beside["mx.fast.rope"], beside[label]), 2) for label in ("rope", "rope_qk")},
        "spread": round(beside["rope_qk"].spread, 3),
        "seconds": {label: as_json(t) for label, t in (alone | beside).items()},
    }


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="rotary embedding of q and k, CPU: medians in us; speed-ups are over mx.fast.rope")
    for name in ("order", "dtype", "shape", "rope_qk", "x", "rope", "x", "mx.fast.rope", "share of copy", "spread"):
        result.add_column(name, justify="right")
    for row in rows:
        us = {label: f"{t['median'] * 1e6:.0f}" for label, t in row["seconds"].items()}
        speedup = {label: f"{x:.1f}" for label, x in row["speedup"].items()}
        cells = [us["rope_qk"], speedup["rope_qk"], us["rope"], speedup["rope"], us["mx.fast.rope"]]
        shape = " x ".join(map(str, row["shape"]))
        result.add_row(row["order"], row["dtype"], shape, *cells, f"{row['share_of_copy']:.2f}", f"{row['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.set_cache_limit(REUSED_BYTES)
    rows = [
        run_row(shape, dtype, traditional, rounds)
        for shape in SHAPES
        for dtype in DTYPES
        for traditional in (False, True)
    ]
    console = Console(width=150)
    console.print(table(rows))
    console.print(f"written: {write_results('rope_cpu', rows)}")


if __name__ == "__main__":
    main()

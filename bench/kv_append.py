"""kv_append on the CPU against MLX's ops: ``mx.fast.rope``, ``mx.quantize`` and slice updates.

    python bench/kv_append.py

writes bench/results/kv_append_cpu.json. Caches are passed on from call to call, so that both sides may write in place.
Figures are from one run on two threads (or as many as OMP_NUM_THREADS says).
"""

from collections.abc import Callable
from typing import Any

from harness import as_json, console_table, measure, ratio, write_results

import click
import mlx.core as mx
from rich.console import Console

import mlx_anvil
from mlx_anvil._check import dtype_name

HEADS, DIM, CAPACITY, OFFSET = 8, 128, 4096, 1024
LENGTHS = (1, 512)  # a token, a prompt
BITS = (None, 4, 8)
DTYPES = (mx.float16, mx.float32)


class Caches:
    """Caches that a contestant replaces at each call."""

    def __init__(self, dtype: mx.Dtype, bits: int | None) -> None:
        self.bits = bits
        made = [mx.random.normal((1, HEADS, CAPACITY, DIM)).astype(dtype) for _ in range(2)]
        self.sides: Any = made if bits is None else [[mx.contiguous(y) for y in mx.quantize(x, 64, bits)] for x in made]
        mx.eval(self.sides)

    def append(self, k: mx.array, v: mx.array) -> None:
        a, b = self.sides
        self.sides = None  # so that the caches have no other reference
        options: dict[str, Any] = {} if self.bits is None else {"kv_group_size": 64, "kv_bits": self.bits}
        result = mlx_anvil.kv_append(a, b, k, v, offset=OFFSET, rope={"dims": DIM}, **options)
        del a, b
        mx.eval(result)
        self.sides = result

    def append_by_mlx(self, k: mx.array, v: mx.array) -> None:
        keys = mx.fast.rope(k, DIM, traditional=False, base=10000.0, scale=1.0, offset=OFFSET)
        end = OFFSET + k.shape[2]
        for i, x in enumerate((keys, v)):
            if self.bits is None:
                self.sides[i][:, :, OFFSET:end] = x
                continue
            for cache, part in zip(self.sides[i], mx.quantize(x, 64, self.bits), strict=True):
                cache[:, :, OFFSET:end] = part
        mx.eval(self.sides)


def run_row(length: int, dtype: mx.Dtype, bits: int | None, rounds: int) -> dict[str, Any]:
    k, v = (mx.random.normal((1, HEADS, length, DIM)).astype(dtype) for _ in range(2))
    mx.eval(k, v)
    ours, theirs = Caches(dtype, bits), Caches(dtype, bits)
    runs: dict[str, Callable[[], None]] = {
        "kv_append": lambda: ours.append(k, v),
        "MLX": lambda: theirs.append_by_mlx(k, v),
    }
    seconds = measure(runs, rounds=rounds, budget_seconds=0.5)
    return {
        "op": "kv_append",
        "dtype": dtype_name(dtype),
        "bits": bits,
        "shape": [1, HEADS, length, DIM],
        "speedup": round(ratio(seconds["MLX"], seconds["kv_append"]), 2),
        "seconds": {label: as_json(t) for label, t in seconds.items()},
    }


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    rows = [run_row(length, dtype, bits, rounds) for length in LENGTHS for dtype in DTYPES for bits in BITS]
    table = console_table(
        f"keys and values of {HEADS} heads of {DIM} into a cache of {CAPACITY} rows, CPU: medians in us",
        figures=("tokens", "dtype", "bits", "kv_append", "MLX", "x"),
    )
    for row in rows:
        us = {label: f"{t['median'] * 1e6:.0f}" for label, t in row["seconds"].items()}
        cells = (us["kv_append"], us["MLX"], f"{row['speedup']:.1f}")
        table.add_row(str(row["shape"][2]), row["dtype"], str(row["bits"] or "plain"), *cells)
    console = Console()
    console.print(table)
    console.print(f"written: {write_results('kv_append_cpu', rows)}")


if __name__ == "__main__":
    main()

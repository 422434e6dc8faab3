"""Gradients of quantized products on the CPU beside those of MLX's own op.

    python bench/quantized_gradients.py

writes bench/results/quantized_gradients_cpu.json. Figures are from one run on two threads (or as many as
OMP_NUM_THREADS says). The matrices stay in a cache. Speeds compare the shortest rounds: MLX's slowest calls take
seconds, so its rounds are few, and other programs delay two threads more often than its one.
"""

from collections.abc import Callable, Iterator
from typing import Any

from harness import as_json, console_table, measure, write_results

import click
import mlx.core as mx
from rich.console import Console

from mlx_anvil import quantized_matmul
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

# A matrix of as many rows as columns, by the rows of x.
SIZES = {1: 2048, 8: 2048, 512: 1024}
FORMATS: tuple[dict[str, Any], ...] = (
    {"mode": "affine", "bits": 4, "group_size": 64},
    {"mode": "affine", "bits": 4, "group_size": 32},
    {"mode": "affine", "bits": 8, "group_size": 64},
    {"mode": "affine", "bits": 2, "group_size": 32},
    *({"mode": mode} for mode in ("mxfp4", "mxfp8", "nvfp4")),
)
# With float16 MLX takes half a minute for the gradient of 512 rows in x.
SLOW = (mx.float16, 512)
BUDGET = 4.0


def name_of(options: dict[str, Any]) -> str:
    if options["mode"] != "affine":
        return str(options["mode"])
    return f"{options['bits']} bits, groups of {options['group_size']}"


def gradient(
    op: Callable[..., mx.array], parts: list[mx.array], x: mx.array, what: str, options: dict[str, Any]
) -> Callable[[], None]:
    """The vjp of one product, in x or in what scales it."""
    w, *others = parts
    primals = [x] if what == "x" else others

    def product(*given: mx.array) -> mx.array:
        return op(given[0], *parts, **options) if what == "x" else op(x, w, *given, **options)

    dy = mx.random.normal((x.shape[0], w.shape[0])).astype(x.dtype)
    mx.eval(dy)
    return lambda: mx.eval(mx.vjp(product, primals, [dy])[1])


def cases() -> Iterator[tuple[dict[str, Any], int, mx.Dtype, str]]:
    for options in FORMATS:
        for rows in SIZES:
            for dtype in DTYPES:
                if (dtype, rows) != SLOW:
                    yield options, rows, dtype, "x"
                if options["mode"] == "affine":
                    yield options, rows, dtype, "scales and biases"


def line_of(options: dict[str, Any], rows: int, dtype: mx.Dtype, what: str, rounds: int) -> dict[str, Any]:
    size = SIZES[rows]
    weights = mx.random.normal((size, size)).astype(dtype if options["mode"] == "affine" else mx.float32)
    parts, x = mx.quantize(weights, **options), mx.random.normal((rows, size)).astype(dtype)
    mx.eval(parts, x)
    # Not in turn: MLX's calls would leave caches without the matrix.
    ours = measure({"ours": gradient(quantized_matmul, list(parts), x, what, options)}, rounds=rounds)["ours"]
    mlx = {"MLX": gradient(mx.quantized_matmul, list(parts), x, what, options)}
    of_mlx = measure(mlx, rounds=5, least_rounds=2, budget_seconds=BUDGET)["MLX"]
    return {
        "op": what,
        "format": name_of(options),
        "dtype": dtype_name(dtype),
        "shape": [rows, size, size],
        "spread": round(ours.spread, 3),
        "speedup": {"MLX": round(min(of_mlx.rounds) / min(ours.rounds), 2)},
        "shortest": {"ours": min(ours.rounds), "MLX": min(of_mlx.rounds)},
        "seconds": {"ours": as_json(ours), "MLX": as_json(of_mlx)},
    }


@click.command()
@click.option("--rounds", default=41, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.random.seed(0)
    mx.set_default_device(mx.cpu)
    console = Console(width=130)
    table = console_table("gradients, CPU", words=("in", "format", "dtype"), figures=("rows", "ms", "vs MLX"))
    lines = []
    for case in cases():
        line = line_of(*case, rounds)
        lines.append(line)
        figures = (str(line["shape"][0]), f"{1e3 * line['shortest']['ours']:.3f}")
        table.add_row(line["op"], line["format"], line["dtype"], *figures, f"{line['speedup']['MLX']:.1f}")
    console.print(table)
    console.print(f"written: {write_results('quantized_gradients_cpu', lines)}")


if __name__ == "__main__":
    main()

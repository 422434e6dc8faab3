"""Quantized products on the CPU against MLX, PyTorch and what the machine can read.

    python bench/bench_quantized_matmul.py [--only GROUP]

writes bench/results/quantized_matmul_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS
says). "Read" is a sum over as many bytes as w, scales and biases have, from memory of MLX's: what a product of one row
cannot beat. PyTorch's int4 product is `_weight_int4pack_mm_for_cpu`, group 64, in bfloat16 (what it is made for).
"""

from collections.abc import Callable
from typing import Any

import click
import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from harness import as_json, measure, ratio, write_results
from mlx_anvil import _ext, quantized_matmul, quantized_swiglu, silu_gate
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

Contestants = dict[str, Callable[[], Any]]

K = 4096
DECODE_OUTPUTS = (4096, 14336)
FORMATS: tuple[dict[str, Any], ...] = (
    *({"mode": "affine", "bits": bits, "group_size": 64} for bits in (2, 3, 4, 5, 6, 8)),
    *({"mode": mode} for mode in ("mxfp4", "mxfp8", "nvfp4")),
)
FOUR_BITS = FORMATS[2]


def draw(outputs: int, dtype: mx.Dtype, options: dict[str, Any]) -> list[mx.array]:
    weights = mx.random.normal((outputs, K)).astype(dtype if options["mode"] == "affine" else mx.float32)
    parts = mx.quantize(weights, **options)
    mx.eval(parts)
    return list(parts)


def normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def read_contestant(matrix: list[mx.array]) -> Contestants:
    source = np.asarray(mx.ones(sum(part.nbytes for part in matrix) // 4))
    return {"read": lambda: _ext._read(source)}


def torch_int4(rows: int, outputs: int) -> Contestants:
    """PyTorch's packed product of random codes; the values do not matter for its time."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(_ext._max_threads())
    codes = torch.randint(0, 16, (outputs, K), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales_and_zeros = torch.randn(K // 64, outputs, 2).to(torch.bfloat16)
    x = torch.randn(rows, K).to(torch.bfloat16)
    return {
        "PyTorch int4": lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 64, scales_and_zeros),
    }


def torch_sgemm(rows: int, outputs: int) -> Contestants:
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(_ext._max_threads())
    x, w = torch.randn(rows, K), torch.randn(outputs, K)
    return {"PyTorch float32": lambda: torch.nn.functional.linear(x, w)}


def row(
    what: str, dtype: mx.Dtype, shape: tuple[int, int, int], contestants: Contestants, **more: Any
) -> dict[str, Any]:
    """One line; `ours` is what all others are set against."""
    timings = measure(contestants, rounds=more.pop("rounds"), budget_seconds=8)
    ours = timings["ours"]
    return {
        "op": what,
        "dtype": dtype_name(dtype),
        "shape": list(shape),
        **more,
        "spread": round(ours.spread, 3),
        "speedup": {label: round(ratio(t, ours), 3) for label, t in timings.items() if label != "ours"},
        "seconds": {label: as_json(t) for label, t in timings.items()},
    }


def decode_rows(rounds: int) -> list[dict[str, Any]]:
    """One row and eight, each dtype, 4 bits; beside MLX, PyTorch and the reading of the same bytes."""
    rows = []
    for outputs in DECODE_OUTPUTS:
        for dtype in DTYPES:
            matrix = draw(outputs, dtype, FOUR_BITS)
            one, eight = normal((1, K), dtype), normal((8, K), dtype)
            contestants: Contestants = {
                "ours": lambda x=one, m=matrix: mx.eval(quantized_matmul(x, *m, **FOUR_BITS)),
                "ours, 8 rows": lambda x=eight, m=matrix: mx.eval(quantized_matmul(x, *m, **FOUR_BITS)),
                "MLX": lambda x=one, m=matrix: mx.eval(mx.quantized_matmul(x, *m, **FOUR_BITS)),
                **torch_int4(1, outputs),
                **read_contestant(matrix),
            }
            total = sum(part.nbytes for part in matrix)
            rows.append(
                row("decode", dtype, (1, outputs, K), contestants, bytes=total, format="affine 4", rounds=rounds)
            )
    return rows


def format_rows(rounds: int) -> list[dict[str, Any]]:
    """Every format at one row, interleaved with the 4-bit one: time per byte."""
    rows = []
    four = draw(K, mx.float32, FOUR_BITS)
    x = normal((1, K), mx.float32)
    four_bytes = sum(part.nbytes for part in four)
    for options in FORMATS:
        matrix = draw(K, mx.float32, options)
        total = sum(part.nbytes for part in matrix)
        contestants: Contestants = {
            "ours": lambda m=matrix, o=options: mx.eval(quantized_matmul(x, *m, **o)),
            "affine 4": lambda: mx.eval(quantized_matmul(x, *four, **FOUR_BITS)),
            **read_contestant(matrix),
        }
        name = f"{options['mode']} {options.get('bits', '')}".strip()
        line = row("format", mx.float32, (1, K, K), contestants, bytes=total, format=name, rounds=rounds)
        line["per_byte_over_4_bits"] = round(four_bytes / total / line["speedup"]["affine 4"], 3)
        rows.append(line)
    return rows


def prefill_rows(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for dtype in DTYPES:
        matrix, x = draw(K, dtype, FOUR_BITS), normal((512, K), dtype)
        contestants: Contestants = {
            "ours": lambda x=x, m=matrix: mx.eval(quantized_matmul(x, *m, **FOUR_BITS)),
            **torch_sgemm(512, K),
        }
        rows.append(row("prefill", dtype, (512, K, K), contestants, format="affine 4", rounds=min(rounds, 5)))
    return rows


def gradient_rows(rounds: int) -> list[dict[str, Any]]:
    """The gradient in x beside the forward, which is the same work."""
    rows = []
    for count in (1, 8, 512):
        for dtype in DTYPES:
            matrix = draw(K, dtype, FOUR_BITS)
            x = normal((count, K), dtype)

            def forward(x: mx.array, matrix: list[mx.array] = matrix) -> mx.array:
                return quantized_matmul(x, *matrix, **FOUR_BITS)

            contestants: Contestants = {
                "ours": lambda x=x, f=forward: mx.eval(mx.vjp(f, [x], [x])[1]),
                "forward": lambda x=x, f=forward: mx.eval(f(x)),
            }
            rows.append(row("gradient", dtype, (count, K, K), contestants, format="affine 4", rounds=min(rounds, 5)))
    return rows


def swiglu_rows(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for dtype in DTYPES:
        gate, up = (draw(14336, dtype, FOUR_BITS) for _ in range(2))
        x = normal((1, K), dtype)
        contestants: Contestants = {
            "ours": lambda x=x, g=gate, u=up: mx.eval(quantized_swiglu(x, tuple(g), tuple(u), **FOUR_BITS)),
            "in steps": lambda x=x, g=gate, u=up: mx.eval(
                silu_gate(quantized_matmul(x, *g, **FOUR_BITS), quantized_matmul(x, *u, **FOUR_BITS))
            ),
        }
        rows.append(row("swiglu", dtype, (1, 14336, K), contestants, format="affine 4", rounds=rounds))
    return rows


GROUPS = {
    "decode": decode_rows,
    "format": format_rows,
    "prefill": prefill_rows,
    "gradient": gradient_rows,
    "swiglu": swiglu_rows,
}


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="Quantized products, CPU: medians in ms; ratios are time of the other over ours")
    for name in ("", "format", "dtype", "M x N x K", "ours", "GB/s", "others", "spread"):
        result.add_column(name)
    for line in rows:
        median = line["seconds"]["ours"]["median"]
        speed = f"{line['bytes'] / median / 1e9:.1f}" if "bytes" in line else ""
        others = ", ".join(f"{label} {value:.2f}" for label, value in line["speedup"].items())
        if "per_byte_over_4_bits" in line:
            others += f", per byte {line['per_byte_over_4_bits']:.2f}"
        shape = " x ".join(map(str, line["shape"]))
        cells = (line["op"], line["format"], line["dtype"], shape, f"{median * 1e3:.3f}", speed, others)
        result.add_row(*cells, f"{line['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=11, help="Rounds per row, after a warm-up.")
@click.option("--only", type=click.Choice(sorted(GROUPS)), help="One group; nothing is written then.")
def main(rounds: int, only: str | None) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.random.seed(0)
    mx.set_default_device(mx.cpu)
    console = Console(width=170)
    rows = [line for name, group in GROUPS.items() if only in (None, name) for line in group(rounds)]
    console.print(table(rows))
    if only is None:
        console.print(f"written: {write_results('quantized_matmul_cpu', rows)}")


if __name__ == "__main__":
    main()

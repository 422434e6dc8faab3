"""Quantized products on the CPU against MLX, PyTorch and what the machine can read.

    python bench/quantized_matmul.py [--only GROUP]

writes bench/results/quantized_matmul_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS
says). "Read" is a sum over as many bytes as w, scales and biases have, from memory of MLX's: what a product of one row
cannot beat. Decoding uses other weights each time, of a set that caches do not hold, as in a model, where all other
layers come between. PyTorch's int4 product is `_weight_int4pack_mm_for_cpu`, group 64, in bfloat16 (what it is made
for).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from harness import as_json, comparison, console_table, in_turn, installed_torch, measure, ratio, write_results

import click
import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from mlx_anvil import _ext, quantized_matmul, quantized_swiglu, silu_gate
from mlx_anvil.reference import DTYPES

Contestants = dict[str, Callable[[], Any]]

K = 4096
MORE_THAN_CACHES = 160 << 20
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


def read_contestant(matrices: list[list[mx.array]]) -> Contestants:
    count = sum(part.nbytes for part in matrices[0]) // 4
    sources = [np.asarray(mx.ones(count)) for _ in matrices]
    return {"read": in_turn([lambda source=source: _ext._read(source) for source in sources])}


def draw_sets(outputs: int, dtype: mx.Dtype, options: dict[str, Any]) -> list[list[mx.array]]:
    """Equal matrices in as many places as caches cannot hold."""
    first = draw(outputs, dtype, options)
    count = math.ceil(MORE_THAN_CACHES / sum(part.nbytes for part in first))
    copies = [[mx.array(np.array(part.view(mx.uint8))).view(part.dtype) for part in first] for _ in range(count - 1)]
    mx.eval(copies)
    return [first, *copies]


def products(x: mx.array, matrices: list[list[mx.array]], options: dict[str, Any]) -> Callable[[], Any]:
    return in_turn([lambda m=matrix: mx.eval(quantized_matmul(x, *m, **options)) for matrix in matrices])


def torch_int4(rows: int, outputs: int, count: int) -> Contestants:
    """PyTorch's packed product of random codes; the values do not matter for its time."""
    torch = installed_torch()
    if torch is None:
        return {}
    torch.set_num_threads(_ext._max_threads())
    codes = torch.randint(0, 16, (outputs, K), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales_and_zeros = torch.randn(K // 64, outputs, 2).to(torch.bfloat16)
    sets = [(packed.clone(), scales_and_zeros.clone()) for _ in range(count)]
    x = torch.randn(rows, K).to(torch.bfloat16)
    calls = [lambda w=w, s=s: torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, 64, s) for w, s in sets]
    return {"PyTorch int4": in_turn(calls)}


def torch_sgemm(rows: int, outputs: int) -> Contestants:
    torch = installed_torch()
    if torch is None:
        return {}
    torch.set_num_threads(_ext._max_threads())
    x, w = torch.randn(rows, K), torch.randn(outputs, K)
    return {"PyTorch float32": lambda: torch.nn.functional.linear(x, w)}


row = partial(comparison, budget_seconds=8)


def decode_rows(rounds: int) -> list[dict[str, Any]]:
    """One row and eight, each dtype, 4 bits; beside MLX, PyTorch and the reading of the same bytes."""
    rows = []
    for outputs in DECODE_OUTPUTS:
        for dtype in DTYPES:
            matrices = draw_sets(outputs, dtype, FOUR_BITS)
            one, eight = normal((1, K), dtype), normal((8, K), dtype)
            total = sum(part.nbytes for part in matrices[0])
            contestants: Contestants = {
                "ours": products(one, matrices, FOUR_BITS),
                "ours, 8 rows": products(eight, matrices, FOUR_BITS),
                **torch_int4(1, outputs, len(matrices)),
                **read_contestant(matrices),
            }
            line = row("decode", dtype, (1, outputs, K), contestants, bytes=total, format="affine 4", rounds=3 * rounds)
            slow = {
                "ours": contestants["ours"],
                "MLX": lambda x=one, m=matrices[0]: mx.eval(mx.quantized_matmul(x, *m, **FOUR_BITS)),
            }
            timings = measure(slow, rounds=5)
            line["speedup"]["MLX"] = round(ratio(timings["MLX"], timings["ours"]), 1)
            line["seconds"]["MLX"] = as_json(timings["MLX"])
            rows.append(line)
    return rows


def format_rows(rounds: int) -> list[dict[str, Any]]:
    """Every format at one row, interleaved with the 4-bit one: time per byte."""
    rows = []
    four = draw_sets(K, mx.float32, FOUR_BITS)
    x = normal((1, K), mx.float32)
    four_bytes = sum(part.nbytes for part in four[0])
    for options in FORMATS:
        matrices = draw_sets(K, mx.float32, options)
        total = sum(part.nbytes for part in matrices[0])
        contestants: Contestants = {
            "ours": products(x, matrices, options),
            "affine 4": products(x, four, FOUR_BITS),
            **read_contestant(matrices),
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
            of_count = min(rounds, 5) if count > 8 else 3 * rounds  # few rows take so little that more is needed
            rows.append(row("gradient", dtype, (count, K, K), contestants, format="affine 4", rounds=of_count))
    return rows


def swiglu_at_once(x: mx.array, gate: list[mx.array], up: list[mx.array]) -> None:
    mx.eval(quantized_swiglu(x, tuple(gate), tuple(up), **FOUR_BITS))


def swiglu_in_steps(x: mx.array, gate: list[mx.array], up: list[mx.array]) -> None:
    mx.eval(silu_gate(quantized_matmul(x, *gate, **FOUR_BITS), quantized_matmul(x, *up, **FOUR_BITS)))


def swiglu_rows(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for outputs in DECODE_OUTPUTS:
        for dtype in DTYPES:
            x = normal((1, K), dtype)
            pairs = list(zip(*(draw_sets(outputs, dtype, FOUR_BITS) for _ in range(2)), strict=True))
            contestants: Contestants = {
                label: in_turn([partial(run, x, gate, up) for gate, up in pairs])
                for label, run in (("ours", swiglu_at_once), ("in steps", swiglu_in_steps))
            }
            rows.append(row("swiglu", dtype, (1, outputs, K), contestants, format="affine 4", rounds=3 * rounds))
    return rows


GROUPS = {
    "decode": decode_rows,
    "format": format_rows,
    "prefill": prefill_rows,
    "gradient": gradient_rows,
    "swiglu": swiglu_rows,
}


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "Quantized products, CPU: medians in ms; ratios are time of the other over ours",
        words=("", "format", "dtype", "M x N x K", "ours", "GB/s", "others", "spread"),
    )
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

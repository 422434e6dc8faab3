"""All ops on an NVIDIA GPU, inside MLX's CUDA backend, against what MLX has there and against copying memory.

    python bench/cuda.py [--only GROUP] [--name cuda_h200]

writes bench/results/<name>.json. A contestant makes as many calls as fill some tens of milliseconds and waits for the last;
contestants run interleaved in one process, figures are medians. Beside that time of the host, "gpu" is what the GPU needs
for the same calls: from the start of the first kernel to the end of the last, by PyTorch's profiler. "Copy" is cudaMemcpy
from device to device, which PyTorch makes, of as many bytes read and written in all; a share is of its rate. Matrices and
keys that a call only reads once are drawn from sets that the GPU's cache cannot hold, as in a model, where all other
layers come between.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from harness import in_turn, write_results

import click
import mlx.core as mx
import mlx.nn as nn
from rich.console import Console

from cuda_caches import cache_rows
from cuda_decoder import HALF_DTYPES, decoder_rows, normal
from cuda_experts import expert_rows
from cuda_first_launch import first_rows
from cuda_norm import norm_rows, rope_rows
from cuda_overhead import overhead_rows
from cuda_quantized import quantized_rows
from cuda_timing import Call, Row, compare, copy_rate, peak_bytes
from mlx_anvil import flash_attention, silu_gate
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

# ---- silu_gate -------------------------------------------------------------------------------------------------------


def elementwise_rows(copy: float | None) -> Iterator[Row]:
    def plain(gate: mx.array, up: mx.array) -> mx.array:
        return nn.silu(gate) * up

    def backward_of(function: Callable[..., mx.array]) -> Callable[..., list[mx.array]]:
        return lambda gate, up, dy: mx.vjp(function, [gate, up], [dy])[1]

    forward = {"ours": silu_gate, "compiled": mx.compile(plain)}
    backward = {"ours": backward_of(silu_gate), "compiled": mx.compile(backward_of(plain))}
    for shape, dtype in itertools.product(((16384, 16384), (64, 64)), DTYPES):
        arrays = [normal(shape, dtype) for _ in range(3)]
        name = f"{dtype_name(dtype)} {shape[0]}x{shape[1]}"
        for what, functions, operands, moved in (("forward", forward, 2, 3), ("backward", backward, 3, 5)):
            contestants: dict[str, Call] = {
                label: partial(function, *arrays[:operands]) for label, function in functions.items()
            }
            work = {"bytes": moved * arrays[0].nbytes}
            yield compare(f"silu_gate {what} {name}", contestants, work=work, copy=copy)


# ---- attention -------------------------------------------------------------------------------------------------------


def composed_attention(
    q: mx.array, k: mx.array, v: mx.array, *, window_size: int | None = None, softcap: float | None = None
) -> mx.array:
    """Causal attention in MLX ops."""
    scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
    if softcap:
        scores = softcap * mx.tanh(scores / softcap)
    positions = mx.arange(q.shape[2])
    distance = positions[:, None] - positions[None]
    visible = (distance >= 0) & (distance < window_size) if window_size else distance >= 0
    scores = mx.where(visible, scores, mx.array(-float("inf"), scores.dtype))
    return mx.softmax(scores, axis=-1, precise=True) @ v


def draw_attention(batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, dtype: mx.Dtype) -> Any:
    return (
        normal((batch, heads, queries, dim), dtype),
        normal((batch, kv_heads, keys, dim), dtype),
        normal((batch, kv_heads, keys, dim), dtype),
    )


def attention_rows(copy: float | None) -> Iterator[Row]:
    attend = mx.fast.scaled_dot_product_attention
    for batch, heads, kv_heads, length, dim in ((1, 32, 8, 4096, 128), (4, 16, 16, 2048, 64)):
        for dtype, mask in itertools.product(HALF_DTYPES, (None, "causal")):
            qkv = draw_attention(batch, heads, kv_heads, length, length, dim, dtype)
            contestants = {
                "ours": partial(flash_attention, *qkv, mask=mask, return_lse=True),  # without lse, cuDNN would serve it
                "mlx": partial(attend, *qkv, scale=dim**-0.5, mask=mask),
            }
            flops = 4.0 * batch * heads * length * length * dim * (0.5 if mask else 1)
            shape = f"({batch}, {heads}/{kv_heads}, {length}, {dim})"
            yield compare(f"attention {dtype_name(dtype)} {shape} {mask or 'full'}", contestants, work={"flops": flops})
    for dtype in HALF_DTYPES:
        keys, dim = 32768, 128
        sets = [draw_attention(1, 32, 8, 1, keys, dim, dtype) for _ in range(3)]
        contestants = {
            "ours": in_turn([partial(flash_attention, *qkv) for qkv in sets]),
            "mlx": in_turn([partial(attend, *qkv, scale=dim**-0.5) for qkv in sets]),
        }
        work = {"bytes": sets[0][1].nbytes * 2}
        yield compare(f"decode {dtype_name(dtype)} 32/8 heads of {dim}, {keys} keys", contestants, work=work, copy=copy)


def training_rows(copy: float | None) -> Iterator[Row]:
    features: tuple[tuple[int, dict[str, Any]], ...] = ((8192, {"window_size": 1024}), (4096, {"softcap": 30.0}))
    for (length, options), dtype in itertools.product(features, HALF_DTYPES):
        qkv = list(draw_attention(1, 8, 8, length, length, 128, dtype))
        d_out = normal(qkv[0].shape, dtype)
        composed = partial(composed_attention, **options)
        functions = {"ours": partial(flash_attention, mask="causal", **options), "composed": composed}
        functions["compiled"] = mx.compile(composed)
        contestants: dict[str, Call] = {
            label: partial(mx.vjp, function, qkv, [d_out]) for label, function in functions.items()
        }
        feature = ", ".join(f"{name}={value}" for name, value in options.items())
        what = f"attention forward and backward {dtype_name(dtype)} (1, 8, {length}, 128) causal, {feature}"
        row = compare(what, contestants, work={})
        peaks = {f"{label}_peak_bytes": peak_bytes(call) for label, call in contestants.items()}
        yield row | peaks | {"times_peak": round(peaks["composed_peak_bytes"] / peaks["ours_peak_bytes"], 2)}


GROUPS = {
    "silu_gate": elementwise_rows,
    "norm": norm_rows,
    "rope": rope_rows,
    "quantized": quantized_rows,
    "experts": expert_rows,
    "attention": attention_rows,
    "caches": cache_rows,
    "training": training_rows,
    "decoder": decoder_rows,
    "overhead": overhead_rows,
    "first": first_rows,
}


def rows_of(group: str, copy: float | None) -> list[Row]:
    mx.set_default_device(mx.gpu)
    console = Console(soft_wrap=True)
    rows = []
    for row in GROUPS[group](copy):
        console.print(row)
        rows.append(row)
    return rows


@click.command()
@click.option("--only", type=click.Choice(list(GROUPS)), multiple=True, help="some groups of rows")
@click.option("--name", default="cuda_h200", show_default=True, help="of the file in bench/results")
def main(only: tuple[str, ...], name: str) -> None:
    copy = copy_rate()
    rows: list[Row] = [
        {"what": "copy", "bytes_per_second": copy, "gpu": str(mx.device_info(mx.gpu).get("device_name"))}
    ]
    # Each group in a process of its own: tokens were a third slower after the other groups' graphs and arrays.
    processes = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=processes, max_tasks_per_child=1) as pool:
        for group in only or GROUPS:
            rows += pool.submit(rows_of, group, copy).result()
            write_results(name, rows)  # after each: a run that is cut short has what it measured


if __name__ == "__main__":
    main()

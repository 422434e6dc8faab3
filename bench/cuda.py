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

from harness import write_results

import click
import mlx.core as mx
import mlx.nn as nn
from rich.console import Console

from cuda_attention import attention_rows, training_rows
from cuda_caches import latent_rows, quantized_cache_rows, ragged_rows
from cuda_decoder import decoder_rows, normal
from cuda_delta import delta_rows
from cuda_experts import expert_rows
from cuda_first_launch import first_rows
from cuda_norm import norm_rows, rope_rows
from cuda_overhead import overhead_rows
from cuda_quantized import quantized_rows
from cuda_timing import Call, Row, compare, copy_rate
from mlx_anvil import silu_gate
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


GROUPS = {
    "silu_gate": elementwise_rows,
    "norm": norm_rows,
    "rope": rope_rows,
    "quantized": quantized_rows,
    "experts": expert_rows,
    "attention": attention_rows,
    "quantized_caches": quantized_cache_rows,
    "ragged": ragged_rows,
    "latent": latent_rows,
    "delta": delta_rows,
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

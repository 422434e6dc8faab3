"""Estimates of our kernels' time beside MLX's, on Apple's GPUs: bench/results/estimate.json (docs/estimates.md).

    tools/agx/build.sh                     # once
    python bench/estimate.py               # the comparison
    python bench/estimate.py --validate    # simulates what published times are of again, and fits the model

No time is measured. Ours are launched by the op in the simulator, MLX's from the headers of its wheel; both are
compiled by Mesa for an M1 and go into the same model. `--validate` writes python/mlx_anvil/mslc/validation.json; its
list of published times is kept as it stands there.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

from harness import RESULTS, console_table, write_results

import click
import mlx.core as mx
import numpy as np
from rich.console import Console

import estimate_fit
import mlx_anvil
from agx import sources
from estimate_launches import GEMM, LAUNCHES, Launch, attention, combine, decode, qmv
from estimate_tables import SHOWN
from mlx_anvil._kernel_files import parse_key
from mlx_anvil.mslc.agx import compile_agx
from mlx_anvil.mslc.estimate_work import Work, combine_work
from mlx_anvil.mslc.estimation import chip_error, chips, estimate, ratio, typical_error

DTYPE = "float16"
_BLOCKS = 64  # of keys, of which MLX makes parts on a Pro or Max for four heads that share keys


@dataclass(frozen=True)
class Pair:
    """A call of ours, a part of the real one by `scale`, and MLX's launches for the real one."""

    what: str
    call: Callable[[], mx.array]
    scale: float
    bytes_read: float
    bytes_written: float
    mlx: Callable[[], Sequence[Launch]]


def _random(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.float16)


def _attend(q: mx.array, keys: int) -> mx.array:
    k, v = (_random(1, 1, keys, q.shape[-1]) for _ in range(2))
    return mlx_anvil.flash_attention(q, k, v)


def _decode(keys: int) -> Pair:
    """32 query heads, 8 of keys, head_dim 128; one of the 8 groups is simulated."""
    groups, dim = 8, 128
    read, written = 2 * groups * keys * dim * 2 + 32 * dim * 2, 32 * dim * 2
    return Pair(
        f"decode, {keys} keys",
        lambda: _attend(_random(1, 4, 1, dim), keys),
        groups,
        read,
        written,
        lambda: [decode(keys, dim, 32, groups, _BLOCKS, DTYPE), combine(dim, 32, _BLOCKS, DTYPE)],
    )


def _attention(length: int, dim: int) -> Pair:
    """32 heads, as many keys as queries, no mask; 64 queries of one head are simulated."""
    rows, heads = 64, 32
    size = heads * length * dim * 2
    return Pair(
        f"attention, {length} x {dim}",
        lambda: _attend(_random(1, 1, rows, dim), length),
        heads * length / rows,
        3 * size,
        size,
        lambda: [attention(length, dim, heads, DTYPE)],
    )


def _quantized(rows: int, columns: int, part: int) -> mx.array:
    w = mx.quantize(mx.random.normal((part, columns)).astype(mx.float16), group_size=64, bits=4)
    return mlx_anvil.quantized_matmul(_random(rows, columns), *w, transpose=True, group_size=64, bits=4)


def _product(outputs: int, columns: int) -> Pair:
    """One row, 4 bits in groups of 64; 4096 outputs are simulated, because fewer take another variant."""
    read = outputs * columns * (0.5 + 4 / 64) + columns * 2
    return Pair(
        f"product, 1 row, {columns} to {outputs}",
        lambda: _quantized(1, columns, 4096),
        outputs / 4096,
        read,
        outputs * 2,
        lambda: [qmv(outputs, columns, 4, DTYPE)],
    )


def _prefill(rows: int, outputs: int, columns: int) -> Pair:
    """4 bits in groups of 64; 128 rows and outputs are simulated."""
    read = outputs * columns * (0.5 + 4 / 64) + rows * columns * 2
    return Pair(
        f"product, {rows} rows, {columns} to {outputs}",
        lambda: _quantized(128, columns, 128),
        rows * outputs / 128**2,
        read,
        rows * outputs * 2,
        lambda: [qmm(rows, outputs, columns)],
    )


def qmm(rows: int, outputs: int, columns: int) -> Launch:
    """MLX's product of many rows: one of its tiles of 32 by 32 is simulated."""
    base = qmv(outputs, columns, 4, DTYPE)
    buffers: dict[int, Any] = dict(base.buffers)
    shape, strides = np.ones(4, np.int32), np.zeros(4, np.int64)
    buffers |= {3: np.ones((32, columns), np.float16), 4: np.zeros((32, 32), np.float16), 7: 32}
    buffers |= {8: 1, 9: shape, 10: strides, 11: 1, 12: shape, 13: strides, 14: strides, 15: strides}
    sizes = {**base.sizes, "x": rows * columns * 2, "y": rows * outputs * 2}
    headers = (*GEMM, "quantized_utils.h", "quantized.h")
    return Launch(
        headers, "affine_qmm_t", ("half", 64, 4, "true", "false"), buffers, (outputs // 32, rows // 32, 1), (1, 1, 1),
        (32, 2, 2), {}, sizes,
    )  # fmt: skip


PAIRS = [
    *(_decode(keys) for keys in (1024, 4096, 8192)),
    *(_attention(length, dim) for dim in (64, 128) for length in (1024, 4096)),
    *(_product(outputs, columns) for outputs, columns in ((4096, 4096), (14336, 4096), (4096, 14336))),
    *(_prefill(rows, 4096, 4096) for rows in (512, 2048, 8192)),
]


_sources = cache(sources)


def our_works(pair: Pair) -> list[Work]:
    """The launches of a call, in the simulator, as those of the real call."""
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles, mlx_anvil.trace() as trace:
        mx.eval(pair.call())
    launches = [event for event in trace.events if not event.is_fallback]
    where = _sources()
    works = []
    for event, profile in zip(launches, profiles, strict=True):
        name, constants = parse_key(event.kernel)
        compiled = compile_agx(where[name], [name], constants)[0]
        works.append(combine_work(profile, None, compiled, prod(event.threadgroup), pair.scale))
    main = max(works, key=lambda work: work.bytes_read)
    works[works.index(main)] = replace(main, bytes_read=pair.bytes_read, bytes_written=pair.bytes_written)
    return works


def row(pair: Pair) -> dict[str, Any]:
    ours, mlx = our_works(pair), [launch.work() for launch in pair.mlx()]
    found: dict[str, Any] = {"what": pair.what, "dtype": DTYPE, "estimates": []}
    for name, works in (("ours", ours), ("mlx", mlx)):
        found[name] = [work.to_json() for work in works]
    for chip in chips():
        times = {}
        for name, works in (("ours", ours), ("mlx", mlx)):
            estimates = [estimate(work, chip) for work in works]
            longest = max(estimates, key=lambda e: e.microseconds)
            times[name] = {"microseconds": sum(e.microseconds for e in estimates), "bound": longest.bound}
        found["estimates"].append({"chip": chip, "error": chip_error(chip)[0], **times})
    return found


def validate(console: Console) -> None:
    _, timings = estimate_fit.read_timings()
    works = {}
    for name in dict.fromkeys(timing.work for timing in timings):
        works[name] = LAUNCHES[name]().work()
        console.print(f"{name}: {works[name].unexplained:.1%} of a count unexplained")
    parameters = estimate_fit.fit([timing for timing in timings if not timing.held], works)
    estimate_fit.write(parameters, works, timings)
    console.print(parameters)
    for held in (False, True):
        ratios = [ratio(timing, works, parameters) for timing in timings if timing.held == held]
        console.print(f"{'held out' if held else 'fitted'}: {len(ratios)}, typical error {typical_error(ratios):.1%}")


@click.command()
@click.option("--validate", "refit", is_flag=True, help="Simulate and fit again what the model is validated with.")
@click.option("--only", default="", help="Part of a row's name: the other rows stay as they are in the file.")
def main(refit: bool, only: str) -> None:
    console = Console(width=140)
    if refit:
        validate(console)
        return
    path = RESULTS / "estimate.json"
    kept = {found["what"]: found for found in json.loads(path.read_text())["rows"]} if only else {}
    rows = []
    table = console_table("estimates, ours / MLX's, us", words=("",), figures=SHOWN)
    for pair in PAIRS:
        rows.append(row(pair) if only in pair.what else kept[pair.what])
        by_chip = {e["chip"]: e for e in rows[-1]["estimates"]}
        times = [[by_chip[chip][who]["microseconds"] for who in ("ours", "mlx")] for chip in SHOWN]
        table.add_row(pair.what, *(f"{a:.0f} / {b:.0f} = {a / b:.2f}" for a, b in times))
        print(pair.what, file=sys.stderr)
    console.print(table)
    console.print(write_results("estimate", rows, model="estimates; nothing was run on a GPU"))


if __name__ == "__main__":
    main()

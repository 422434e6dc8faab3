"""The table of docs/apple-kernels.md: our kernels beside MLX's on Apple's GPUs, by one command.

    tools/agx/build.sh          # once
    python bench/apple.py       # a few minutes; fetches three files of MLX's from GitHub
    python bench/plot.py        # writes the table

writes bench/results/apple.json: instructions, registers, spills and threads from Mesa's compiler, bytes from the simulator,
and estimates of time for every chip (docs/estimates.md). Nothing is run on a GPU, and no time is measured.

Ours are launched by the op in the simulator, MLX's as its dispatch would for the chip (apple_mlx.py). Both go through the
same simulator, compiler and model.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from math import prod
from multiprocessing import get_context
from typing import Any

from harness import RESULTS, console_table, write_results

import click
import mlx.core as mx
from rich.console import Console

import apple_experts
import apple_mlx as theirs
import apple_rows
import mlx_anvil
from agx import sources
from apple_mlx import Architecture, Counted, alike, bias, needs_of
from apple_rows import Call, Part, Row
from mlx_anvil._kernel_files import parse_key
from mlx_anvil.mslc.agx import AgxKernel, compile_agx
from mlx_anvil.mslc.estimate_work import combine_work
from mlx_anvil.mslc.estimation import chip_error, chips, core, estimate
from mlx_anvil.mslc.profile import LaunchProfile

FAMILIES = [*apple_rows.FAMILIES, *apple_experts.FAMILIES]
_sources = cache(sources)


@cache
def simulated(call: Call, chip: str) -> list[tuple[str, int, LaunchProfile, AgxKernel] | None]:
    """Launches of a call: pipeline key, threads of a threadgroup, and counts. None is an op of MLX's."""
    make, arguments = call
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True, chip=chip) as profiles, mlx_anvil.trace() as trace:
        mx.eval(make(*arguments))
    found: list[tuple[str, int, LaunchProfile, AgxKernel] | None] = []
    remaining = iter(profiles)
    for event in trace.events:
        if event.is_fallback or event.kernel.startswith("mx."):
            found += [None] * (not event.is_fallback)
            continue
        name, constants = parse_key(event.kernel)
        compiled = compile_agx(_sources()[name], [name], constants)[0]
        found.append((event.kernel, prod(event.threadgroup), next(remaining), compiled))
    assert next(remaining, None) is None, "a launch that trace() does not show"
    return found


def our_launches(row: Row, chip: str) -> list[Counted]:
    found: list[Counted] = []
    for part in (Part(row.call, row.scale), *row.others):
        skip = row.skip if part.call is row.call else ()
        for launch in simulated(part.call, alike(chip, row.differ)):
            if launch is None:
                assert row.left
                found += row.left(Architecture.of(chip))
            elif any(name in launch[0] for name in part.keep) and not any(name in launch[0] for name in skip):
                found.append(_counted(row, part.scale, launch))
    return found


def _counted(row: Row, scale: float, launch: tuple[str, int, LaunchProfile, AgxKernel]) -> Counted:
    key, threads, profile, compiled = launch
    work = combine_work(profile, compiled, threads, scale)
    for name, (read, written) in row.moved.items():
        if name in key:
            work = replace(work, bytes_read=read, bytes_written=written)
    return Counted(replace(work, kernel=key), needs_of(compiled))


def _described(found: Sequence[Counted]) -> list[dict[str, Any]]:
    return [
        {"kernel": c.work.kernel, "bytes": round(c.work.bytes_read + c.work.bytes_written), **(c.needs or {})}
        | ({"unexplained": round(c.work.unexplained, 2)} if c.work.unexplained > 0.1 else {})
        for c in found
    ]


def estimated(counted: Sequence[Counted], chip: str, chunks: int = 1) -> dict[str, Any]:
    """Microseconds of all launches, and what bounds the longest. `bias` is corrected, down to what memory takes."""
    times, bounds = [], []
    for found in counted:
        e = estimate(theirs.times(found, 1 / chunks).work, chip)
        least = e.resources["memory"] + core().launch_us
        times.append(chunks * max(e.microseconds / bias(e.kernel), min(least, e.microseconds)))
        bounds.append(e.bound)
    longest = times.index(max(times))
    return {"microseconds": float(f"{sum(times):.5g}"), "bound": bounds[longest], "longest": longest}


def counted_row(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"op": row.op, "what": row.what, "dtype": row.dtype}
    variants: dict[str, dict[str, dict[str, Any]]] = {"ours": {}, "mlx": {}}
    found["estimates"] = []
    for chip in chips():
        ours, mlx = our_launches(row, chip), row.mlx(Architecture.of(chip))
        for who, counted in (("ours", ours), ("mlx", mlx)):
            described = _described(counted)
            known = variants[who].setdefault(json.dumps(described), {"chips": [], "launches": described})
            known["chips"].append(chip)
        times = {"ours": estimated(ours, chip, row.chunks(chip)), "mlx": estimated(mlx, chip)}
        found["estimates"].append({"chip": chip, "error": round(chip_error(chip)[0], 4), **times})
    first, *others = variants["ours"].values()
    return found | {"ours": first["launches"], "ours elsewhere": others, "mlx": list(variants["mlx"].values())}


def family(index: int, only: Sequence[str]) -> list[dict[str, Any]]:
    rows = list(FAMILIES[index]())
    names = [f"{row.op}, {row.what}, {row.dtype}" for row in rows]
    return [counted_row(row) for row, name in zip(rows, names, strict=True) if any(part in name for part in only)]


def name_of(found: Mapping[str, Any]) -> str:
    return f"{found['op']}, {found['what']}, {found['dtype']}"


@click.command()
@click.option(
    "--only", multiple=True, help="Part of a row's name, also several times; the others stay as they are in the file."
)
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="Processes.")
def main(only: tuple[str, ...], jobs: int) -> None:
    path = RESULTS / "apple.json"
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        found = []
        for part in pool.map(family, range(len(FAMILIES)), [only or ("",)] * len(FAMILIES)):
            found += part
            for row in part:
                print(name_of(row), file=sys.stderr)
    if only and path.exists():
        renewed = {name_of(row): row for row in found}
        kept = json.loads(path.read_text())["rows"]
        found = [renewed.pop(name_of(row), row) for row in kept] + list(renewed.values())
    table = console_table("estimates, ours / MLX's", words=("",), figures=("M1", "M4 Max", "best", "worst"))
    for row in found:
        ratios = {e["chip"]: e["ours"]["microseconds"] / e["mlx"]["microseconds"] for e in row["estimates"]}
        table.add_row(
            name_of(row),
            *(f"{r:.2f}" for r in (ratios["M1"], ratios["M4 Max"], min(ratios.values()), max(ratios.values()))),
        )
    console = Console(width=120)
    console.print(table)
    console.print(write_results("apple", found, model="estimates; nothing was run on a GPU"))


if __name__ == "__main__":
    main()

"""estimate: a model of the time of a launch on Apple's GPUs."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..diagnostics import CompileError
from ..estimate_work import Work, measure_work
from ..estimation import Estimate, EstimateError, chips, estimate, validation
from ..launches import LaunchDescription, parse_extent
from ..preprocess import Source
from ..simulator import SimulationError
from ..toolchain import ToolchainError
from .launch_options import BUFFERS_HELP, described_launches, launch_options

NO_MEASUREMENT = "A model's result, no measurement: typical error is of published times of MLX's kernels on that chip."


@click.command(name="estimate", help=f"Estimate the time of KERNEL in FILE on Apple's GPUs.\n\n{BUFFERS_HELP}")
@launch_options
@click.option("--chip", "names", multiple=True, metavar="NAME", help='Such as "M2 Max"; all chips without this option.')
@click.option("--cores", type=int, help="Cores of its GPU, if not those of the largest variant.")
@click.option("--sample", metavar="X,Y,Z", help="Simulate only these threadgroups, which stand for the whole grid.")
@click.option(
    "--warm", is_flag=True, help="Assume that what the launch reads is in the system-level cache, if it fits."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    names: tuple[str, ...], cores: int | None, sample: str | None, warm: bool, as_json: bool, **launch: Any
) -> None:
    try:
        if sample and launch["dispatch"] == "threads":
            raise EstimateError(
                "--sample counts threadgroups, but the grid counts threads: use --dispatch threadgroups"
            )
        described = described_launches(**launch)
        if cores and len(names) != 1:
            raise EstimateError("--cores needs exactly one --chip")
        for name in names:  # a chip that is refused costs no simulation
            estimate(_nothing(), name, cores)
        works = [_work(description, sample) for description in described]
        found = [[estimate(work, name, cores, warm=warm) for name in names or chips()] for work in works]
    except (CompileError, SimulationError, ToolchainError, ValueError) as error:
        sys.exit(str(error))
    if as_json:
        rows = zip(works, found, strict=True)
        click.echo(json.dumps([{"work": w.to_json(), "estimates": [e.to_json() for e in es]} for w, es in rows]))
        return
    console = Console(soft_wrap=True)
    for work, estimates in zip(works, found, strict=True):
        console.print(Text(work.kernel))
        console.print(_table(estimates))
        if work.unexplained > _MUCH:
            console.print(f"The code's loops miss the simulator's counts by {work.unexplained:.0%}.")
    console.print(NO_MEASUREMENT)


_MUCH = 0.1


def _nothing() -> Work:
    return next(iter(validation()[1].values()))


def _work(description: LaunchDescription, sample: str | None) -> Work:
    source = Source.load(description.source, description.include, description.defines)
    part = parse_extent(sample) if sample else None
    return measure_work(
        source,
        description.kernel,
        description.bind().arrays,
        description.grid,
        description.threadgroup,
        constants=description.constants,
        threadgroup_memory=description.threadgroup_memory,
        dispatch=description.dispatch,
        sample=part,
    )


def _table(estimates: list[Estimate]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (
        "chip",
        "estimate",
        "bound by",
        "typical error",
        "largest",
        "published times",
        "SIMD groups a core",
    ):
        table.add_column(heading, justify="left" if heading in ("chip", "bound by") else "right", no_wrap=True)
    for e in estimates:
        cells = [str(e.chip), duration(e.microseconds), e.bound, f"{e.error:.0%}", f"{e.worst:.0%}", str(e.timings)]
        table.add_row(*cells, str(e.simdgroups_per_core))
    return table


def duration(microseconds: float) -> str:
    return f"{microseconds:.3g} us" if microseconds < 1e3 else f"{microseconds / 1e3:.3g} ms"

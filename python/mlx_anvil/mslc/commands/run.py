"""run: launches kernels on arrays that are loaded from files or generated."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ..compiler import CHECKED, UNCHECKED
from ..diagnostics import CompileError
from ..simulator import DEFAULT_STEP_LIMIT, SimulationError
from .launch_options import BUFFERS_HELP, described_launches, launch_options


@click.command(name="run", help=f"Run KERNEL of FILE in the simulator.\n\n{BUFFERS_HELP}")
@launch_options
@click.option("--seed", default=0, help="Shuffle the schedule by this seed; 0 keeps the order.")
@click.option("--threads", default=0, help="Host threads, 0 for all cores.")
@click.option("--step-limit", default=DEFAULT_STEP_LIMIT)
@click.option("--checked", is_flag=True, help="Check for races, out-of-bounds accesses and other errors.")
def command(seed: int, threads: int, step_limit: int, checked: bool, **launch: Any) -> None:
    console = Console(soft_wrap=True)
    try:
        for description in described_launches(**launch):
            library, bindings = description.library(CHECKED if checked else UNCHECKED), description.bind()
            start = time.perf_counter()
            report = library.run(**description.arguments(bindings), seed=seed, threads=threads, step_limit=step_limit)
            elapsed = time.perf_counter() - start
            bindings.save()
            for finding in report.findings:
                console.print(Text(str(finding), style="yellow"))
            console.print(
                f"{description.kernel}: {report.threadgroups} threadgroups, {report.barriers} barriers, "
                f"{report.collectives} SIMD-group operations, {report.threadgroup_memory} bytes of threadgroup memory, "
                f"{elapsed * 1e3:.1f} ms"
            )
    except (CompileError, SimulationError, ValueError) as error:
        sys.exit(str(error))

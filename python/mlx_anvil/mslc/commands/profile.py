"""profile: counts the memory traffic of kernels and compares it between kernels."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ..compiler import PROFILED
from ..diagnostics import CompileError
from ..launches import LaunchDescription, is_description, load_launches
from ..profile import LaunchProfile, by_kernel, combine
from ..profile_table import metrics_table, sites_table
from ..simulator import SimulationError
from .launch_options import BUFFERS_HELP, described_launches, launch_options


@click.command(name="profile", help=f"Profile the memory accesses of KERNEL in FILE.\n\n{BUFFERS_HELP}")
@launch_options
@click.option(
    "--against",
    metavar="LAUNCH",
    help="Compare with a second launch: a launch description, or KERNEL or FILE:KERNEL with the same arguments.",
)
@click.option("--places", default=10, show_default=True, help="Number of source positions to list.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(against: str | None, places: int, as_json: bool, **launch: Any) -> None:
    try:
        launches = described_launches(**launch)
        others = _others(against, launches) if against else []
        ours = [profile_launch(description) for description in launches]
        theirs = [profile_launch(description) for description in others]
    except (CompileError, SimulationError, ValueError) as error:
        sys.exit(str(error))
    if as_json:
        click.echo(json.dumps({"profiles": _to_json(ours)} | ({"against": _to_json(theirs)} if theirs else {})))
        return
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = 160  # rich assumes 80 columns for a pipe
    if theirs:
        columns = [_column(launches, ours), _column(others, theirs)]
        console.print(metrics_table(columns, compare=True))
    else:
        columns = [(d.label or p.kernel, p) for d, p in zip(launches, ours, strict=True)]
        console.print(metrics_table(columns + ([("total", combine(ours))] if len(ours) > 1 else [])))
    for title, profile in columns:
        if places and profile.sites:
            console.print(f"\n[bold]{title}[/bold]", highlight=False)
            console.print(sites_table(profile, places))


def profile_launch(description: LaunchDescription) -> LaunchProfile:
    library, bindings = description.library(PROFILED), description.bind()
    report = library.run(**description.arguments(bindings))
    bindings.save()
    assert report.profile is not None
    return report.profile


def _others(against: str, launches: list[LaunchDescription]) -> list[LaunchDescription]:
    if is_description(against):
        return load_launches(against)
    file, colon, kernel = against.rpartition(":")
    return [
        replace(description, kernel=kernel, label="", source=Path(file) if colon else description.source)
        for description in launches
    ]


def _column(launches: list[LaunchDescription], profiles: list[LaunchProfile]) -> tuple[str, LaunchProfile]:
    total = combine(profiles)
    return launches[0].label or total.kernel, total


def _to_json(profiles: list[LaunchProfile]) -> dict[str, Any]:
    return {
        "launches": [profile.to_json() for profile in profiles],
        "kernels": [profile.to_json() for profile in by_kernel(profiles)],
        "total": combine(profiles).metrics(),
    }

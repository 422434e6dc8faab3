"""The launch options of `run` and `profile`: a description file, or a source with a kernel and its buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..launches import LaunchDescription, LaunchError, is_description, load_launches, parse_extent
from .options import parse_constants, source_options

BUFFERS_HELP = """FILE is a Metal source, or a launch description (.toml, .json) with all other arguments. BUFFERS are
INDEX=VALUE: a number, DTYPE:NUMBER, in.npy, zeros|ones|arange|random:DTYPE:SHAPE, each array optionally followed by
:out.npy, or struct:DTYPE=VALUE,..."""

_DECORATORS = (
    click.argument("file", type=click.Path(exists=True, dir_okay=False)),
    click.argument("kernel", required=False, default=""),
    click.argument("buffers", nargs=-1),
    click.option("--grid", metavar="X,Y,Z", help="Threadgroups, or threads with --dispatch threads."),
    click.option("--threadgroup", metavar="X,Y,Z", help="Threads per threadgroup."),
    click.option("--dispatch", type=click.Choice(["threadgroups", "threads"]), default="threadgroups"),
    click.option(
        "--threadgroup-memory", multiple=True, type=int, metavar="BYTES", help="Length of a buffer, in order."
    ),
)


def launch_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that `described_launches` takes."""
    function = source_options(function)
    for decorator in reversed(_DECORATORS):
        function = decorator(function)
    return function


def described_launches(
    file: str,
    kernel: str,
    buffers: tuple[str, ...],
    grid: str | None,
    threadgroup: str | None,
    dispatch: str,
    threadgroup_memory: tuple[int, ...],
    include_dirs: tuple[str, ...],
    defines: tuple[str, ...],
    constants: tuple[str, ...],
) -> list[LaunchDescription]:
    if is_description(file):
        if kernel or grid or threadgroup:
            raise click.UsageError(f"{file} describes the whole launch: omit KERNEL, --grid and --threadgroup")
        return load_launches(file)
    if not (kernel and grid and threadgroup):
        raise click.UsageError("a Metal source needs KERNEL, --grid and --threadgroup")
    bound: dict[int | str, str] = {}
    for text in buffers:
        index, equals, value = text.partition("=")
        if not equals:
            raise LaunchError(f"'{text}' is not INDEX=VALUE")
        bound[int(index) if index.isdigit() else index] = value
    pairs = (definition.partition("=") for definition in defines)
    return [
        LaunchDescription(
            Path(file),
            kernel,
            parse_extent(grid),
            parse_extent(threadgroup),
            bound,
            dispatch,
            threadgroup_memory,
            include_dirs,
            parse_constants(constants),
            {name: value or "1" for name, _, value in pairs},
        )
    ]

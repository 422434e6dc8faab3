"""list: prints the kernels and function constants of a file."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console
from rich.table import Table

from ..diagnostics import CompileError
from ..entry import BUILTIN, THREADGROUP, Parameter
from ..preprocess import NotTextError
from ..simulator import Library
from ..static_memory import static_threadgroup_memory
from .options import load_source, parse_constants, source_options


@click.command(name="list")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@source_options
def command(
    file: str, as_json: bool, include_dirs: tuple[str, ...], defines: tuple[str, ...], constants: tuple[str, ...]
) -> None:
    """Print the kernels of FILE with their parameters and function constants."""
    try:
        source, values = load_source(file, include_dirs, defines), parse_constants(constants)
        library = Library(source, constants=values)
        memory = static_threadgroup_memory(source, values)
    except (CompileError, NotTextError) as error:
        sys.exit(str(error))
    console = Console(soft_wrap=True)
    if as_json:
        console.print_json(json.dumps(describe(library, memory)))
        return
    for kernel in library.kernels.values():
        limit = library.max_threads(kernel.name)
        table = Table(title=kernel.name, title_justify="left", caption_justify="left")
        notes = [f"{memory[kernel.name]} bytes of static threadgroup memory"] if memory[kernel.name] else []
        notes += [f"at most {limit} threads per threadgroup"] if limit else []
        table.caption = ", ".join(notes) or None
        for heading in ("binding", "type", "name"):
            table.add_column(heading)
        for parameter in kernel.parameters:
            table.add_row(_binding(parameter), parameter.type, parameter.name)
        console.print(table)
    for constant in library.compiled.module.constants:
        console.print(f"function constant {constant.index}: {constant.type} {constant.name}")


def describe(library: Library, memory: dict[str, int]) -> dict:
    module = library.compiled.module.to_json()
    for kernel in module["kernels"]:
        kernel["static_threadgroup_memory"] = memory[kernel["name"]]
        kernel["max_threads"] = library.max_threads(kernel["name"])
    return module


def _binding(parameter: Parameter) -> str:
    if parameter.kind == BUILTIN:
        return parameter.builtin
    kind = "threadgroup" if parameter.kind == THREADGROUP else "buffer"
    condition = f" if {parameter.function_constant}" if parameter.function_constant else ""
    return f"{kind}({parameter.index}){condition}"

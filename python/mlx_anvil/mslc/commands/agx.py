"""agx: counts what kernels need as machine code of Apple GPUs."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..agx import MOST_REGISTERS, MOST_THREADS, AgxKernel, compile_agx, kernel_names
from ..agx_code import CLASSES, OTHER
from ..diagnostics import CompileError
from .options import load_source, parse_constants, source_options
from .progress import in_progress

_HEADINGS = {
    "special": "spec.",
    "integer": "int.",
    "convert": "conv.",
    "device memory": "dev.",
    "threadgroup": "tg.",
    "SIMD group": "SIMD",
    "branch": "br.",
}


@click.command(name="agx")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--kernel", "kernels", multiple=True, metavar="NAME", help="Compile only this kernel. Repeatable.")
@click.option("--constants", "listed", default="", metavar="NAME=VALUE,...", help="Function constants in one list.")
@click.option("--disassemble", is_flag=True, help="Print the instructions too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@source_options
def command(
    file: str,
    kernels: tuple[str, ...],
    listed: str,
    disassemble: bool,
    as_json: bool,
    include_dirs: tuple[str, ...],
    defines: tuple[str, ...],
    constants: tuple[str, ...],
) -> None:
    """Compile kernels of FILE for an M1 or M2, and print what their machine code needs.

    Mesa's open compiler generates the code, not Apple's, and nothing is run, so use the numbers to compare kernels. The
    command `estimate` models time.
    """
    values = parse_constants((*filter(None, listed.split(",")), *constants))
    console = Console(soft_wrap=True)
    try:
        source = load_source(file, include_dirs, defines)
        names = kernels or kernel_names(source, values)
        found = [compile_agx(source, [name], values)[0] for name in in_progress(names, Console(stderr=True))]
    except (CompileError, ValueError) as error:
        sys.exit(str(error))
    if as_json:
        listings = [{"code": kernel.code} if disassemble else {} for kernel in found]
        click.echo(json.dumps([kernel.to_json() | code for kernel, code in zip(found, listings, strict=True)]))
        return
    for number, kernel in enumerate(found, 1):
        console.print(Text(f"{number}  {kernel.name}"))
        if disassemble:
            console.print(Text(kernel.code))
    console.print()
    console.print(needs_table(found))
    console.print(
        f"Registers are 16-bit halves, {MOST_REGISTERS} at most; threads: how many of {MOST_THREADS} fit at once."
    )
    console.print()
    console.print(classes_table(found))


def needs_table(kernels: list[AgxKernel]) -> Table:
    table = _table("instructions", "registers", "threads", "spills:fills", "threadgroup bytes")
    for number, kernel in enumerate(kernels, 1):
        cells = [f"{kernel.instructions:,}", str(kernel.registers), str(kernel.threads)]
        cells += [f"{kernel.spills}:{kernel.fills}", f"{kernel.threadgroup_bytes:,}"]
        table.add_row(str(number), *cells, style="red" if kernel.spills else "")
    return table


def classes_table(kernels: list[AgxKernel]) -> Table:
    names = [name for name in (*CLASSES, OTHER) if any(kernel.classes[name] for kernel in kernels)]
    table = _table(*(_HEADINGS.get(name, name) for name in names))
    for number, kernel in enumerate(kernels, 1):
        table.add_row(str(number), *(str(kernel.classes[name]) for name in names))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table

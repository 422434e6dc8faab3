"""ptx: compiles kernels for NVIDIA GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from ..diagnostics import CompileError
from ..ptx import ARCHITECTURES, assemble, compile_ptx
from ..toolchain import ToolchainError, write_atomically
from .options import load_source, parse_constants, source_options
from .progress import in_progress


@click.command(name="ptx")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--arch", default=",".join(ARCHITECTURES), show_default=True, help="Architectures, separated by commas.")
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False), help="Folder to write to.")
@click.option("--assemble", "assembles", is_flag=True, help="Run ptxas; fail if registers are spilled.")
@source_options
def command(
    files: tuple[str, ...],
    arch: str,
    output: str,
    assembles: bool,
    include_dirs: tuple[str, ...],
    defines: tuple[str, ...],
    constants: tuple[str, ...],
) -> None:
    """Compile all kernels of FILES to PTX.

    Writes NAME.ARCH.ptx and NAME.ARCH.json, which describes how each kernel is launched.
    """
    console = Console(soft_wrap=True)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    spilled = False
    for path in in_progress(files, console):
        for name in arch.split(","):
            try:
                module = compile_ptx(load_source(path, include_dirs, defines), name, parse_constants(constants))
                target = folder / f"{Path(path).stem}.{name}.ptx"
                write_atomically(target, module.text.encode())
                write_atomically(target.with_suffix(".json"), json.dumps(module.to_json(), indent=1).encode())
                console.print(Text(f"{target}: {len(module.kernels)} kernels"))
                for entry, report in (assemble(module) if assembles else {}).items():
                    spilled |= report.spill_bytes > 0
                    line = f"  {entry}: {report.registers} registers, {report.shared_bytes} bytes of threadgroup memory"
                    line += f", {report.stack_bytes} bytes of stack" if report.stack_bytes else ""
                    line += f", {report.spill_bytes} BYTES SPILLED" if report.spill_bytes else ""
                    console.print(Text(line, style="red" if report.spill_bytes else ""))
            except (CompileError, ToolchainError, ValueError) as error:
                sys.exit(f"{path}: {error}")
    sys.exit(1 if spilled else 0)

"""check: strict lint."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.text import Text

from ..lint import lint
from .options import load_source, parse_constants, source_options


@click.command(name="check")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@source_options
def command(
    files: tuple[str, ...], include_dirs: tuple[str, ...], defines: tuple[str, ...], constants: tuple[str, ...]
) -> None:
    """Compile FILES under Metal's address-space rules and report errors."""
    console = Console(stderr=True, soft_wrap=True)
    failed = False
    for path in files:
        found = lint(load_source(path, include_dirs, defines), parse_constants(constants))
        errors = [d for d in found if d.severity == "error"]
        failed |= bool(errors)
        for diagnostic in found:
            console.print(Text(str(diagnostic), style="red" if diagnostic.severity == "error" else "yellow"))
        console.print(Text(f"{path}: {len(errors)} error{'' if len(errors) == 1 else 's'}"))
    sys.exit(1 if failed else 0)

"""check: strict lint, and what else Apple's compiler may refuse."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.text import Text

from ..conformance import conformance
from ..lint import lint
from .options import load_source, parse_constants, source_options


@click.command(name="check")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@source_options
@click.option(
    "--conformance", "conform", is_flag=True, help="also look for what upstream clang takes and Metal 3.1 does not"
)
def command(
    files: tuple[str, ...],
    include_dirs: tuple[str, ...],
    defines: tuple[str, ...],
    constants: tuple[str, ...],
    conform: bool,
) -> None:
    """Compile FILES under Metal's address-space rules and report errors."""
    console = Console(stderr=True, soft_wrap=True)
    failed = False
    for path in files:
        source = load_source(path, include_dirs, defines)
        found = conformance(source) if conform else lint(source, parse_constants(constants))
        errors = [d for d in found if d.severity == "error"]
        failed |= bool(errors)
        for diagnostic in found:
            console.print(Text(str(diagnostic), style="red" if diagnostic.severity == "error" else "yellow"))
        console.print(Text(f"{path}: {len(errors)} error{'' if len(errors) == 1 else 's'}"))
    sys.exit(1 if failed else 0)

"""check: runs the strict lint and, on request, the conformance checks."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.text import Text

from ..conformance import STANDARDS, conformance
from ..lint import lint
from ..preprocess import NotTextError
from .options import load_source, parse_constants, source_options
from .progress import in_progress


@click.command(name="check")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@source_options
@click.option(
    "--conformance",
    "conform",
    is_flag=True,
    help="Also report code that upstream clang accepts and Apple's compiler may reject.",
)
@click.option(
    "--std",
    "standards",
    multiple=True,
    type=click.Choice(tuple(STANDARDS)),
    help="With --conformance: check this version of the language instead of all.",
)
@click.option(
    "--attested",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="With --conformance: more Metal source that is known to compile. The mlx package's headers always count.",
)
def command(
    files: tuple[str, ...],
    include_dirs: tuple[str, ...],
    defines: tuple[str, ...],
    constants: tuple[str, ...],
    conform: bool,
    standards: tuple[str, ...],
    attested: tuple[str, ...],
) -> None:
    """Compile FILES under Metal's address-space rules and report errors."""
    if not conform and (standards or attested):
        raise click.UsageError("--std and --attested need --conformance")
    console = Console(stderr=True, soft_wrap=True)
    failed = False
    for path in in_progress(files, console):
        try:
            source = load_source(path, include_dirs, defines)
        except NotTextError as error:
            failed = True
            console.print(Text(str(error), style="red"))
            console.print(Text(f"{path}: 1 error"))
            continue
        if conform:
            found = conformance(source, standards or tuple(STANDARDS), attested)
        else:
            found = lint(source, parse_constants(constants))
        errors = [d for d in found if d.severity == "error"]
        failed |= bool(errors)
        for diagnostic in found:
            console.print(Text(str(diagnostic), style="red" if diagnostic.severity == "error" else "yellow"))
        console.print(Text(f"{path}: {len(errors)} error{'' if len(errors) == 1 else 's'}"))
    sys.exit(1 if failed else 0)

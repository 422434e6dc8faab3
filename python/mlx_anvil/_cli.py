"""What the commands share: choice of backends, progress, and how figures are written."""

from collections.abc import Sequence

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mlx_anvil import _info


def chosen_backends(backends: Sequence[str]) -> list[str]:
    """Those, or all usable ones; ``click.BadParameter`` for one that is not."""
    usable = _info.usable_backends()
    for backend in backends:
        if backend not in usable:
            raise click.BadParameter(
                f"{backend} is not usable here; usable: {', '.join(usable)}.", param_hint="--backend"
            )
    return list(backends or usable)


def progress_bar() -> Progress:
    """On stderr, so that stdout is the result; gone when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def time_text(seconds: float) -> str:
    """``12.3 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def bytes_text(count: int) -> str:
    """``12.3 MiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"

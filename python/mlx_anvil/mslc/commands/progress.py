"""Progress of commands that work through many files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LEAST = 3  # files that are worth a bar


def in_progress(files: Sequence[str], console: Console) -> Iterator[str]:
    """Yields the files, and shows on a terminal which one is worked on and how much time is left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    is_shown = len(files) >= LEAST and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("", total=len(files))
        for path in files:
            progress.update(task, description=path)
            yield path
            progress.advance(task)

"""Progress of commands that work through many files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from ..progress import progress_bar

LEAST = 3  # files that are worth a bar


def in_progress(files: Sequence[str], console: Console) -> Iterator[str]:
    """Yields the files, and shows on a terminal which one is worked on and how much time is left."""
    with progress_bar(console, is_shown=len(files) >= LEAST) as progress:
        task = progress.add_task("", total=len(files))
        for path in files:
            progress.update(task, description=path)
            yield path
            progress.advance(task)

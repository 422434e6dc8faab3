"""What the commands share: the choice of backends, output, progress, and the format of figures."""

import errno
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from mlx_anvil import _info
from mlx_anvil._extras import explanation

WIDTH = 80


class Commands(click.Group):
    """A group whose errors are one line each, and whose options without a command belong to ``check``."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parses the arguments."""
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help", "--version")):
            args = ["check", *args]
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command.

        Raises:
            click.ClickException: the arguments are not allowed, or the command failed; its text is one line.
        """
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            error.ctx = None  # click prints the usage above the error of a context
            raise
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            if getattr(error, "errno", None) == errno.EPIPE:
                raise
            if text := explanation(error, "this command"):
                raise click.ClickException(text) from error
            first = (str(error) or "no message").splitlines()[0]
            raise click.ClickException(f"{type(error).__name__}: {first}") from error


def chosen_backends(backends: Sequence[str], usable: Sequence[str] | None = None) -> list[str]:
    """The given backends; all usable ones if none is given.

    Raises:
        click.BadParameter: a given one is not usable.
    """
    usable = _info.usable_backends() if usable is None else usable
    for backend in backends:
        if backend not in usable:
            raise click.BadParameter(
                f"{backend} is not usable here; usable: {', '.join(usable)}.", param_hint="--backend"
            )
    return list(backends or usable)


def console(stderr: bool = False) -> Console:
    """Writes to stdout, or to stderr: as wide as the terminal, and 80 columns in a pipe."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = shutil.get_terminal_size((WIDTH, 24)).columns if is_terminal else WIDTH
    return Console(width=max(WIDTH, width), highlight=False, stderr=stderr)


def say(target: Console, text: str, style: str = "") -> None:
    """Prints a sentence, wrapped at 80 columns. Words such as paths are not split."""
    for line in textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False):
        target.print(Text(line, style=style), soft_wrap=True)


class Columns:
    """A table without borders whose cells are never cut. Text columns are left-aligned, figures right-aligned.

    Args:
        names: heads of the text columns.
        figures: heads of the columns of figures, which follow.
    """

    def __init__(self, names: Sequence[str], figures: Sequence[str] = ()) -> None:
        self._names = len(names)
        self._rows: list[list[Text] | Text] = [[Text(head, style="bold") for head in (*names, *figures)]]

    def heading(self, text: str) -> None:
        """Adds a line of text, which does not widen the columns."""
        self._rows.append(Text(text, style="bold"))

    def row(self, *cells: str | Text) -> None:
        """Adds one row."""
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def lines(self) -> Iterator[Text]:
        """The rows as text, with two spaces between columns."""
        rows = [row for row in self._rows if isinstance(row, list)]
        widths = [max(row[index].cell_len for row in rows) for index in range(len(rows[0]))]
        for row in self._rows:
            if isinstance(row, Text):
                yield row
                continue
            line = Text()
            for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
                space = " " * (width - cell.cell_len)
                line.append_text(
                    Text.assemble("  " if index else "", *((cell, space) if index < self._names else (space, cell)))
                )
            line.rstrip()
            yield line

    def print_to(self, target: Console) -> None:
        """Prints the lines as they are, however wide the terminal is."""
        for line in self.lines():
            target.print(line, soft_wrap=True)


def progress_bar() -> Progress:
    """mslc's, with the time left. On stderr, so that stdout has the results alone."""
    from mlx_anvil import mslc  # the search for usable backends has imported it

    return mslc.progress_bar(Console(stderr=True))


def _significant(value: float) -> float:
    return float(f"{value:.3g}")


def time_text(seconds: float) -> str:
    """``12.3 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if _significant(seconds * scale) >= 1:
            return f"{_significant(seconds * scale):g} {unit}"
    return f"{_significant(seconds * 1e6):g} us"


def ratio_text(ratio: float) -> str:
    """``12.3x``."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 99.95 else f"{ratio:.0f}x"


def bytes_text(count: int) -> str:
    """``12.3 MiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}" if count >= 1000 * scale else f"{count / scale:.3g} {unit}"
    return f"{count} B"

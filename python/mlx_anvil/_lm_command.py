"""``python -m mlx_anvil lm NAME ...``: runs a command of mlx-lm, in which every model that it loads is patched."""

import atexit
import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint, distribution
from types import ModuleType

import click
from rich.console import Console

from mlx_anvil import lm
from mlx_anvil._cli import WIDTH, say
from mlx_anvil._extras import is_installed, need
from mlx_anvil._lm_progress import benchmark_progress
from mlx_anvil._tables import plural
from mlx_anvil.patching import Report

_REPORT = "--report"
_INTERRUPTED = 128 + 2  # the status of a shell for a process that SIGINT ended


def commands() -> dict[str, EntryPoint]:
    """The commands of the installed mlx-lm, by their names without ``mlx_lm.``."""
    found = {
        point.name.removeprefix("mlx_lm."): point
        for point in distribution("mlx-lm").entry_points
        if point.group == "console_scripts" and point.name.startswith("mlx_lm.")
    }
    return dict(sorted(found.items()))


def without_report(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Takes ``--report`` out of the arguments of a command, and says if it was there.

    Argparse accepts abbreviations, so that ``--report`` with a value is ``--report-to`` of ``mlx_lm.lora``. Ours has
    no value.
    """
    kept: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            kept += arguments[index:]
            break
        has_value = index > 0 and index + 1 < len(arguments) and not arguments[index + 1].startswith("-")
        if argument != _REPORT or has_value:
            kept.append(argument)
    return kept, len(kept) < len(arguments)


def _console() -> Console:
    """On stderr: stdout is the command's."""
    return Console(stderr=True, width=WIDTH, highlight=False)


def _say(text: str) -> None:
    say(_console(), f"mlx-anvil: {text}")


def _announce(report: Report, in_full: bool) -> None:
    if in_full:
        _console().print(report)
    else:
        _say(report.summary)


def _close(reports: Sequence[Report]) -> None:
    """The last word: which calls fell back."""
    if not reports:
        _say("the command loaded no model, so nothing was patched.")
    for report in reports:
        total = sum(fallback.count for fallback in report.fallbacks)
        if not total:
            _say(f"{report.model}: no call fell back to MLX's ops.")
            continue
        _say(f"{report.model}: {plural(total, 'call')} fell back to MLX's ops:")
        for fallback in report.fallbacks:
            say(_console(), f"  {fallback.count} of {fallback.op}: {fallback.reason}")


def _extra_of(error: ModuleNotFoundError) -> str:
    """The extra of mlx-lm that has a missing module; empty if none has it."""
    project = str(error.name).partition(".")[0].replace("_", "-")
    for requirement in distribution("mlx-lm").requires or []:
        if found := re.match(rf"{re.escape(project)}\b.*extra == \"(?!test)(\w+)\"", requirement):
            return found[1]
    return ""


def _missing(point: EntryPoint, error: ModuleNotFoundError) -> str:
    extra = _extra_of(error)
    command = f'pip install "mlx-lm[{extra}]"' if extra else f"pip install {error.name}"
    return f"{point.name} needs {error.name}, which is not installed: {command}"


def _print_error(point: EntryPoint, error: Exception) -> None:
    """Without the frames of this file, a traceback is what the command itself prints."""
    if isinstance(error, ModuleNotFoundError) and _extra_of(error):
        print(f"Error: {_missing(point, error)}", file=sys.stderr)
    else:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


def _run(point: EntryPoint, arguments: Sequence[str], in_full: bool) -> int | str | None:
    """Runs the command in this process. Returns its exit status, as ``sys.exit`` takes it."""
    reports: list[Report] = []

    def note(report: Report) -> None:
        reports.append(report)
        _announce(report, in_full)

    try:
        module = importlib.import_module(point.module)
    except ModuleNotFoundError as error:
        raise click.ClickException(_missing(point, error)) from error
    before, sys.argv = sys.argv, [f"python -m mlx_anvil lm {point.name.removeprefix('mlx_lm.')}", *arguments]
    lm.patch_all()
    status: int | str | None
    try:
        with lm._listening(note), _progress(point, module, arguments):
            status = getattr(module, point.attr)()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except SystemExit as end:  # argparse: --help, wrong options
        if not reports:
            raise
        status = end.code
    except Exception as error:
        _print_error(point, error)
        status = 1
    finally:
        lm.unpatch_all()
        sys.argv = before
    _close(reports)
    return status


def _progress(point: EntryPoint, module: ModuleType, arguments: Sequence[str]) -> AbstractContextManager[None]:
    """The other long commands of mlx-lm show theirs."""
    if point.name == "mlx_lm.benchmark":
        return benchmark_progress(module, arguments, Console(stderr=True))
    return nullcontext()


def _code(status: int | str | None) -> int:
    """The exit status, by the rules of ``sys.exit``."""
    if isinstance(status, str):
        print(status, file=sys.stderr)
        return 1
    return status or 0


def _skip_finalization(code: list[int]) -> None:
    """Ends the process with this code behind all other handlers of ``atexit``.

    MLX 0.32.4 sometimes aborts after them, if another thread than the main one has evaluated arrays, as in the server.
    """

    def end() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code[0])

    atexit.register(end)


class _Lm(click.Command):
    """Lists the commands of mlx-lm below its options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if is_installed("mlx_lm"):
            with formatter.section("Commands of mlx-lm"):
                formatter.write_text(", ".join(commands()))


@click.command(
    name="lm",
    cls=_Lm,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--report]",
    no_args_is_help=True,
)
@click.option(
    _REPORT, "in_full", is_flag=True, help="Print the full report of every patched model instead of one line."
)
@click.argument("name", metavar="COMMAND")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF COMMAND]")
def lm_command(in_full: bool, name: str, arguments: tuple[str, ...]) -> None:
    """Run a command of mlx-lm with patched models.

    COMMAND is run as mlx-lm would, with its own options: generate, chat, server, lora, benchmark and so on. Every
    model that it loads is patched. Lines on stderr say what was swapped, and, at the end, which calls fell back. The
    exit status is the command's.
    """
    if not is_installed("mlx_lm"):
        raise click.ClickException(need("lm", "mlx_lm"))
    known = commands()
    if name not in known:
        raise click.UsageError(f"mlx-lm has no command {name!r}; it has {', '.join(known)}.")
    rest, asked = without_report(arguments)
    code = [1]
    _skip_finalization(code)
    try:
        code[0] = _code(_run(known[name], rest, in_full or asked))
    except SystemExit as end:
        code[0] = _code(end.code)
    sys.exit(code[0])

"""``python -m mlx_anvil tune``: measures, prints, and writes the file."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import mlx_anvil
from mlx_anvil import _tuning
from mlx_anvil._cli import Columns, console, progress_bar, say, time_text
from mlx_anvil._info import usable_backends
from mlx_anvil.tune import candidates
from mlx_anvil.tune.search import Found, Row, Tuner

_NAMES = [each.name for each in candidates.ALL]
_COUNTS = "The simulator has no times. Counts of memory lines, barriers and SIMD-group operations stand for them."


@click.command()
@click.option("--backend", metavar="BACKEND", help="metal, cuda or simulator. Default: the GPU that is usable.")
@click.option("--chip", metavar="CHIP", help="The chip that the simulator stands in for: 'M4 Max'.")
@click.option(
    "--choice",
    "names",
    multiple=True,
    type=click.Choice(_NAMES),
    metavar="CHOICE",
    help="Measure only this choice. Repeatable.",
)
@click.option("--rounds", type=click.IntRange(min=3), default=9, show_default=True, help="Rounds per measurement.")
@click.option("--dry-run", is_flag=True, help="Write no file.")
@click.option("--all", "show_all", is_flag=True, help="Print every measurement.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def tune(
    backend: str | None,
    chip: str | None,
    names: tuple[str, ...],
    rounds: int,
    dry_run: bool,
    show_all: bool,
    as_json: bool,
) -> None:
    """Measure choices between kernels on this machine, and write a file of the best.

    Each candidate must first give the right result. Times are medians of interleaved rounds. Choices that are not at
    least 3 % better than the default stay as they are. The file is read when the next process launches a kernel;
    MLX_ANVIL_TUNING names another file, or is "off".
    """
    backend = _chosen(backend, chip)
    path = _tuning.path()
    if path is None and not dry_run:
        raise click.ClickException(f"{_tuning.VARIABLE} is off, so no file is read; unset it, or add --dry-run.")
    devices = _existing(path)
    wanted = [each for each in candidates.of_backend(backend) if not names or each.name in names]
    if not wanted:
        raise click.ClickException(f"{backend} does not have {', '.join(names)}, or cannot measure it.")

    found = []
    with Tuner(backend, chip, rounds) as tuner, progress_bar() as progress:
        task = progress.add_task("", total=len(wanted))
        for each in wanted:
            progress.update(task, description=each.name)
            found.append(tuner.search(each))
            progress.update(task, advance=1)
        key = tuner.key
    section = _section(found, devices.get(key, {}), simulated=backend == "simulator")
    body = {"format": _tuning.FORMAT, "devices": {**devices, key: section}}
    written = None if dry_run else path
    if written:
        _write(written, body)
    if as_json:
        print(json.dumps({"device": key, **section}, indent=1))
        return
    _print(found, key, backend, show_all)
    say(console(), f"Wrote {_tuning.shown(written)}." if written else "No file was written.")


def _chosen(backend: str | None, chip: str | None) -> str:
    gpus = [name for name in usable_backends() if name in ("metal", "cuda")]
    simulator = mlx_anvil.info()["backends"]["simulator"]["usable"]
    usable = [*gpus, *["simulator"] * simulator]
    if backend is None and chip is None and not gpus:
        raise click.ClickException("no GPU is usable here, so there is nothing to time; --backend simulator counts.")
    backend = backend or (gpus[0] if chip is None else "simulator")
    if backend not in usable:
        raise click.BadParameter(f"{backend} is not usable here; usable: {', '.join(usable)}.", param_hint="--backend")
    if chip is not None and backend != "simulator":
        raise click.UsageError("--chip is an option of --backend simulator.")
    return backend


def _existing(path: Path | None) -> dict[str, Any]:
    """The sections of the file that exists, which are kept."""
    if path is None or not path.exists():
        return {}
    try:
        return _tuning.load(path)
    except _tuning.TuningFileError as error:
        raise click.ClickException(f"{_tuning.shown(path)}: {error}. Move it away, and try again.") from None


def _write(path: Path, body: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.new")  # readers see either all of the file or none of it
    written.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    written.replace(path)
    _tuning.forget()


def _section(found: list[Found], before: dict[str, Any], *, simulated: bool) -> dict[str, Any]:
    """What the file says about the device: only what differs from the defaults is a choice."""
    choices = {name: value for name, value in before.get("choices", {}).items() if name in _NAMES}
    measured = {name: rows for name, rows in before.get("measured", {}).items() if name in _NAMES}
    for each in found:
        choices.pop(each.name, None)
        if each.chosen != each.default:
            choices[each.name] = each.chosen
        measured[each.name] = [_row(row, simulated) for row in each.rows]
    return {
        "mlx_anvil": mlx_anvil.__version__,
        "mlx": version("mlx"),
        "choices": choices,
        "measured": measured,
    }


def _row(row: Row, simulated: bool) -> dict[str, Any]:
    cost = {"counts" if simulated else "seconds": float(f"{row.cost:.4g}")} if row.right else {"wrong": True}
    return {"call": row.label, "values": list(row.values), **cost, "relative_error": float(f"{row.error:.2g}")}


def _print(found: list[Found], key: str, backend: str, show_all: bool) -> None:
    target = console()
    table = Columns(["choice"], ["default", "chosen", "better by"])
    for each in found:
        gain = f"{each.gain - 1:.0%}" if each.chosen != each.default else "-"
        table.row(each.name, str(each.default), str(each.chosen), gain)
    table.print_to(target)
    target.print()
    if show_all:
        _print_all(found, backend == "simulator", target)
    for each in found:
        if each.wrong:
            values = ", ".join(map(str, each.wrong))
            say(target, f"{each.name}: wrong results with {values}; not used.", style="bold red")
    say(target, _COUNTS if backend == "simulator" else f"Measured on {key}.", style="dim")


def _print_all(found: list[Found], counted: bool, target: Console) -> None:
    table = Columns(["call", "values"], ["count" if counted else "time"])
    for each in found:
        table.heading(each.name)
        for row in each.rows:
            several = len(row.values) > 2
            values = f"{row.values[0]} to {row.values[-1]}" if several else ", ".join(map(str, row.values))
            cost = "wrong" if not row.right else f"{row.cost:.0f}" if counted else time_text(row.cost)
            table.row(f"  {row.label}", values, cost)
    table.print_to(target)
    target.print()

"""``python -m mlx_anvil bench``: measure, save, draw; or compare two runs."""

import sys
from pathlib import Path

import click
from rich.console import Console

from mlx_anvil._cli import chosen_backends, progress_bar
from mlx_anvil.bench import report
from mlx_anvil.bench.compare import compare
from mlx_anvil.bench.results import Results, ResultsError, load, machine, save
from mlx_anvil.bench.suites import SUITES, Settings
from mlx_anvil.bench.timing import busy_note
from mlx_anvil.reference import OPS

_OPS = list(dict.fromkeys(spec.name for spec in OPS.values()))
_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.argument("suites", nargs=-1, type=click.Choice(list(SUITES)), metavar="[op|layer|model]...")
@click.option("--backend", "backends", multiple=True, help="Only this backend; may be repeated.")
@click.option("--op", "ops", multiple=True, type=click.Choice(_OPS), help="Only this op; may be repeated. Suite op.")
@click.option("--rounds", type=click.IntRange(min=5), default=9, show_default=True, help="Rounds of each row.")
@click.option("--quick", is_flag=True, help="float32 and small shapes only: does it run?")
@click.option("--json", "json_path", type=_NEW, help="Save the results.")
@click.option("--plot", "plot_path", type=_NEW, help="Draw them as PNG; needs matplotlib.")
@click.option(
    "--compare", "compared", nargs=2, type=_EXISTING, metavar="A.json B.json", help="B beside A; measures nothing."
)
def bench(
    suites: tuple[str, ...],
    backends: tuple[str, ...],
    ops: tuple[str, ...],
    rounds: int,
    quick: bool,
    json_path: Path | None,
    plot_path: Path | None,
    compared: tuple[Path, Path] | None,
) -> None:
    """Time the ops, modules with them, and a small language model, beside MLX's own.

    All suites without an argument. Both sides run in turn, in one process; figures are medians, and the spread is the
    middle half of the rounds.
    """
    console = Console(width=None if sys.stdout.isatty() else 160)
    if compared:
        if suites or backends or ops or quick or json_path or plot_path:
            raise click.UsageError("--compare reads two files; it takes no suite and no other option.")
        _compare(console, *compared)
        return
    if ops and suites != ("op",):
        raise click.UsageError("--op belongs to the suite op: bench op --op NAME.")
    for path in (json_path, plot_path):
        if path is not None and not path.parent.is_dir():
            raise click.BadParameter(
                f"no folder {path.parent}.", param_hint="--json" if path is json_path else "--plot"
            )
    if plot_path is not None:
        report.require_matplotlib()
    settings = Settings(rounds=rounds, quick=quick)
    cases = [
        case
        for suite in suites or SUITES
        for case in SUITES[suite](settings, chosen_backends(backends), list(ops or _OPS))
    ]
    results = Results(machine(), [])
    with progress_bar() as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.label)
            results.rows.append(case.run(settings))
            progress.advance(task)
    console.print(report.table(results))
    if note := busy_note(max(row.ours.spread, row.mlx.spread) for row in results.rows):
        console.print(f"[yellow]{note}[/yellow]")
    if json_path is not None:
        save(results, json_path)
        console.print(f"written: {json_path}")
    if plot_path is not None:
        report.draw(results, plot_path)
        console.print(f"written: {plot_path}")


def _compare(console: Console, before: Path, now: Path) -> None:
    try:
        a, b = load(before), load(now)
    except ResultsError as error:
        raise click.ClickException(str(error)) from error
    changes = compare(a.rows, b.rows)
    if not changes:
        raise click.ClickException(f"{before} and {now} have no row in common.")
    console.print(report.comparison(changes))
    for line in report.differences(a, b, len(changes)):
        console.print(line)

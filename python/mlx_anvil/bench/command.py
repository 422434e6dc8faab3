"""``python -m mlx_anvil bench``: measures, saves and plots; or compares two saved runs."""

from pathlib import Path

import click

from mlx_anvil._cli import chosen_backends, console, progress_bar, say
from mlx_anvil._extras import is_installed, need
from mlx_anvil.bench import report
from mlx_anvil.bench.compare import compare
from mlx_anvil.bench.results import Results, ResultsError, as_text, load, machine, save
from mlx_anvil.bench.suites import SUITES, Settings
from mlx_anvil.bench.timing import busy_note
from mlx_anvil.reference import OPS

_OPS = list(dict.fromkeys(spec.name for spec in OPS.values()))
_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.argument("suites", nargs=-1, type=click.Choice(list(SUITES)), metavar="[op|layer|model]...")
@click.option("--backend", "backends", multiple=True, metavar="BACKEND", help="Measure only this backend. Repeatable.")
@click.option(
    "--op",
    "ops",
    multiple=True,
    type=click.Choice(_OPS),
    metavar="OP",
    help="Measure only this op (suite op). Repeatable.",
)
@click.option("--rounds", type=click.IntRange(min=5), default=9, show_default=True, help="Rounds per row.")
@click.option("--quick", is_flag=True, help="Measure float32 and small shapes only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--save", "save_path", type=_NEW, metavar="FILE", help="Save the results, for --compare.")
@click.option("--plot", "plot_path", type=_NEW, metavar="FILE", help="Draw the results as PNG. Needs matplotlib.")
@click.option(
    "--compare",
    "compared",
    nargs=2,
    type=_EXISTING,
    metavar="A.json B.json",
    help="Compare two saved runs; measure nothing.",
)
def bench(
    suites: tuple[str, ...],
    backends: tuple[str, ...],
    ops: tuple[str, ...],
    rounds: int,
    quick: bool,
    as_json: bool,
    save_path: Path | None,
    plot_path: Path | None,
    compared: tuple[Path, Path] | None,
) -> None:
    """Time our ops, layers and a small model beside MLX's.

    Runs all suites if none is given. Ours and MLX's run interleaved in one process. Times are medians; the spread is
    the interquartile range.
    """
    if compared:
        if suites or backends or ops or quick or as_json or save_path or plot_path:
            raise click.UsageError("--compare takes two files, and neither a suite nor another option.")
        _compare(*compared)
        return
    if ops and suites != ("op",):
        raise click.UsageError("--op is an option of the suite op: bench op --op NAME.")
    for path in (save_path, plot_path):
        if path is not None and not path.parent.is_dir():
            raise click.BadParameter(
                f"the folder {path.parent} does not exist.", param_hint="--save" if path is save_path else "--plot"
            )
    if plot_path is not None:
        report.require_matplotlib()
    if not is_installed("mlx_lm"):
        if "model" in suites:
            raise click.ClickException(need("the suite model", "mlx_lm"))
        suites = suites or tuple(suite for suite in SUITES if suite != "model")
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
    if as_json:
        click.echo(as_text(results), nl=False)
    else:
        _print_results(results)
    target = console(stderr=as_json)
    if save_path is not None:
        save(results, save_path)
        say(target, f"Results saved to {save_path}.")
    if plot_path is not None:
        report.draw(results, plot_path)
        say(target, f"Plot saved to {plot_path}.")


def _print_results(results: Results) -> None:
    target = console()
    report.table(results).print_to(target)
    target.print()
    say(target, report.TABLE_NOTE, style="dim")
    if note := busy_note(max(row.ours.spread, row.mlx.spread) for row in results.rows):
        say(target, note, style="yellow")


def _compare(before: Path, now: Path) -> None:
    try:
        a, b = load(before), load(now)
    except ResultsError as error:
        raise click.ClickException(str(error)) from error
    changes = compare(a.rows, b.rows)
    if not changes:
        raise click.ClickException(f"{before} and {now} have no row in common.")
    target = console()
    report.comparison(changes).print_to(target)
    target.print()
    say(target, report.COMPARISON_NOTE, style="dim")
    for line in report.differences(a, b, len(changes)):
        say(target, line, style="yellow")

"""Command line: ``python -m mlx_anvil [check|bench|info|lm|report|tune]``; without a command, ``check``."""

import json
import secrets
import sys
import textwrap

import click

import mlx_anvil
from mlx_anvil import _check, _check_table
from mlx_anvil._cli import WIDTH, Commands, chosen_backends, console, progress_bar, say
from mlx_anvil._lm_command import lm_command
from mlx_anvil.bench.command import bench
from mlx_anvil.bench.timing import busy_note
from mlx_anvil.reference import OPS
from mlx_anvil.report.command import report
from mlx_anvil.tune.command import tune

_NAMES = sorted({spec.name for spec in OPS.values()})


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mlx_anvil.__version__, prog_name="mlx-anvil")
def main() -> None:
    """Fused kernels for MLX. Without a command, check runs."""


@main.command()
@click.option("--all", "show_all", is_flag=True, help="Run every case, time it, and print its row.")
@click.option(
    "--op", "ops", multiple=True, type=click.Choice(_NAMES), metavar="OP", help="Check only this op. Repeatable."
)
@click.option("--backend", "backends", multiple=True, metavar="BACKEND", help="Check only this backend. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="INTEGER", help="Seed of the random inputs. Default: a new one."
)
def check(ops: tuple[str, ...], backends: tuple[str, ...], show_all: bool, as_json: bool, seed: int | None) -> None:
    """Compare every op with its float64 definition, and time it.

    At a model's size a case runs in one dtype, which the seed draws; with --all, in each. The times of MLX's ops stand
    beside ours. The exit status is 1 if a result exceeds its error limit, or an op raises.
    """
    seed = secrets.randbelow(2**31) if seed is None else seed
    chosen = _check.cases(list(ops or _NAMES), chosen_backends(backends), None if show_all else seed)
    rows = []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(chosen))
        for row in _check.run(chosen, seed, time_all=show_all):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.op:{max(map(len, _NAMES))}}")

    if as_json:
        found = [{k: None if v != v else v for k, v in row.as_dict().items()} for row in rows]
        print(json.dumps({"info": mlx_anvil.info(), "seed": seed, "rows": found}, indent=1))
    else:
        _print_rows(rows, seed, show_all)
    sys.exit(0 if all(row.passed for row in rows) else 1)


def _print_rows(rows: list[_check.Row], seed: int, show_all: bool) -> None:
    target = console()
    table = _check_table.full_table(rows) if show_all else _check_table.summary_table(rows)
    table.print_to(target)
    target.print()
    for text in _check_table.notes(show_all):
        say(target, text, style="dim")
    if note := busy_note(row.times.spread for row in rows if row.times):
        say(target, note, style="yellow")
    passed = all(row.passed for row in rows)
    say(target, _check_table.closing(rows), style="green" if passed else "bold red")
    if not passed:
        print(_check_table.command_again(rows, seed))  # on one line, to be copied


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(as_json: bool) -> None:
    """Print which backends are usable, versions and build options."""
    facts = mlx_anvil.info()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    print("Backends")
    for name, backend in facts["backends"].items():
        state = "usable" if backend["usable"] else "not usable"
        _print_fact(name, f"{state}: {backend['detail']}")
        if backend["advice"]:
            _print_fact("", f"To do: {backend['advice']}")
    print("\nThis installation")
    for key, value in facts.items():
        if key != "backends":
            _print_fact(key.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))


def _print_fact(name: str, text: str) -> None:
    """Words such as paths are not split."""
    first, rest = f"  {name:16}", " " * 18
    for line in textwrap.wrap(text, WIDTH - len(rest), break_long_words=False, break_on_hyphens=False):
        print(first + line)
        first = rest


main.add_command(bench)
main.add_command(report)
main.add_command(lm_command)
main.add_command(tune)


if __name__ == "__main__":
    main(prog_name="python -m mlx_anvil")

"""Command line: ``python -m mlx_anvil [check|bench|info|report]``; no argument means ``check``."""

import json
import secrets
import sys
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

import mlx_anvil
from mlx_anvil import _check
from mlx_anvil._cli import bytes_text, chosen_backends, progress_bar, time_text
from mlx_anvil.bench.command import bench
from mlx_anvil.bench.timing import busy_note
from mlx_anvil.reference import OPS
from mlx_anvil.report.command import report

_NAMES = list(dict.fromkeys(spec.name for spec in OPS.values()))


def _table(rows: list[_check.Row]) -> Table:
    table = Table(title="Errors are shares of the result's largest magnitude, against the definition in float64")
    for name in ("op", "", "", "dtype", "shape", "backend"):
        table.add_column(name, no_wrap=True)
    for name in ("max error", "limit", "ours", "MLX", "speed-up", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        group = (row.op, row.variant, row.shape, row.backend)
        if previous not in (None, group):
            table.add_section()
        previous = group
        color = "green" if row.passed else "bold red"
        shape = "x".join(map(str, row.shape))
        table.add_row(
            row.op, row.variant, row.what, row.dtype, shape, row.backend, f"[{color}]{row.error:.1e}[/{color}]", f"{row.limit:.1e}",
            time_text(row.ours), time_text(row.mlx), f"{row.speedup:.1f}x", bytes_text(row.peak_memory),
        )  # fmt: skip
    return table


@click.group(invoke_without_command=True)
@click.version_option(mlx_anvil.__version__, prog_name="mlx-anvil")
@click.pass_context
def main(context: click.Context) -> None:
    """Fused kernels for MLX. Without a command: check."""
    if context.invoked_subcommand is None:
        context.invoke(check)


@main.command()
@click.option("--op", "ops", multiple=True, type=click.Choice(_NAMES), help="Only this op; may be repeated.")
@click.option("--backend", "backends", multiple=True, help="Only this backend; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
@click.option("--seed", type=int, default=None, help="Seed of the random inputs; a fresh one by default.")
def check(
    ops: tuple[str, ...] = (), backends: tuple[str, ...] = (), as_json: bool = False, seed: int | None = None
) -> None:
    """Check every op against MLX's own ops on random inputs, and time both.

    Exit code 1 when an error is above its limit.
    """
    chosen = list(ops or _NAMES), chosen_backends(backends)
    seed = secrets.randbelow(2**31) if seed is None else seed
    todo = _check.cases(*chosen)
    rows = []
    with progress_bar() as progress:
        task = progress.add_task(todo[0].label, total=len(todo))
        for number, (_, row) in enumerate(_check.run(*chosen, seed), start=1):
            rows.append(row)
            label = todo[number].label if number < len(todo) else "done"
            progress.update(task, advance=1, description=label)

    failed = [row for row in rows if not row.passed]
    if as_json:
        body = {"info": mlx_anvil.info(), "seed": seed, "rows": [asdict(row) | {"passed": row.passed} for row in rows]}
        print(json.dumps(body, indent=1))
    else:
        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print(_table(rows))
        verdict = (
            f"[bold red]{len(failed)} of {len(rows)} above their limit[/]"
            if failed
            else f"all {len(rows)} within limits"
        )
        if note := busy_note(row.spread for row in rows):
            console.print(f"[yellow]{note}[/]")
        console.print(f"{verdict}; seed {seed}; mlx-anvil {mlx_anvil.__version__}, MLX {mlx_anvil.info()['mlx']}")
    sys.exit(1 if failed else 0)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
def info(as_json: bool) -> None:
    """Print versions, backends and build facts."""
    facts = mlx_anvil.info()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    console = Console()
    table = Table(show_header=False)
    for key, value in facts.items():
        if key != "backends":
            table.add_row(key.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))
    console.print(table)
    backends = Table("backend", "built", "usable", "")
    for name, backend in facts["backends"].items():
        backends.add_row(
            name, "yes" if backend["built"] else "no", "yes" if backend["usable"] else "no", backend["detail"]
        )
    console.print(backends)


main.add_command(bench)
main.add_command(report)


if __name__ == "__main__":
    main(prog_name="python -m mlx_anvil")

"""``python -m mlx_anvil report``: runs the sections and writes the files."""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import click
import mlx.core as mx
from rich.console import Console

import mlx_anvil
from mlx_anvil._cli import progress_bar
from mlx_anvil.report import cases, compiler, markdown, ops, pipelines, system
from mlx_anvil.report.section import Deadline, Outcome, Section

# Of the JSON. A reader of another format is to refuse it.
FORMAT = 1
_ISSUES = "https://github.com/mlx-anvil/mlx-anvil/issues/new?template=hardware-report.yml"

Todo = list[tuple[Section, Callable[[], Outcome]]]


def sections_of(backends: Sequence[str], quick: bool, deadline: Deadline) -> Todo:
    """All sections in their order, each with what runs it."""
    todo: Todo = [
        (Section("system", "Machine and versions"), system.run),
        (Section("compiler", "Metal source through Apple's compiler"), lambda: compiler.run(deadline)),
    ]
    for name in backends:
        build = lambda name=name: pipelines.run(name, quick, deadline)  # noqa: E731
        check = lambda name=name: ops.run(name, quick, deadline)  # noqa: E731
        todo.append((Section(f"pipelines/{name}", f"Pipelines, {name}"), build))
        todo.append((Section(f"ops/{name}", f"Ops, {name}"), check))
    return todo


def without_home(text: str) -> str:
    """The text with the user's folder as ``~``."""
    home = str(Path.home())
    return text.replace(home, "~") if home != "/" else text


def write(folder: Path, sections: Sequence[Section], options: dict[str, object]) -> tuple[Path, Path]:
    """Writes both files anew; returns their paths."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    heading = f"mlx-anvil {mlx_anvil.__version__}, {created}, " + ", ".join(f"{k} {v}" for k, v in options.items())
    body = {"format": FORMAT, "created": created, "options": options, "sections": [asdict(s) for s in sections]}
    paths = folder / "mlx-anvil-report.md", folder / "mlx-anvil-report.json"
    paths[0].write_text(without_home(markdown.document(sections, heading)))
    paths[1].write_text(without_home(json.dumps(body, indent=1)) + "\n")
    return paths


@click.command()
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    help="Folder of the two files; the current one by default.",
)
@click.option("--backend", "chosen", multiple=True, help="Only this backend; may be repeated.")
@click.option("--quick", is_flag=True, help="One small case of each op, and no times.")
@click.option("--minutes", type=click.FloatRange(min=0.1), default=9.0, show_default=True, help="When to stop.")
@click.option("--seed", type=int, default=None, help="Seed of the random inputs; a fresh one by default.")
def report(folder: Path, chosen: tuple[str, ...], quick: bool, minutes: float, seed: int | None) -> None:
    """Test this machine and write a report to attach to an issue.

    Two files: mlx-anvil-report.md, to be read, and mlx-anvil-report.json. They hold versions, the chip, results and
    times; no names of users or folders of yours. Exit code 0 whatever is found.
    """
    usable = cases.backends()
    for name in chosen:
        if name not in usable:
            raise click.BadParameter(f"{name} is not usable here; usable: {', '.join(usable)}.", param_hint="--backend")
    seed = secrets.randbelow(2**31) if seed is None else seed
    mx.random.seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, object] = {"quick": quick, "seed": seed}
    todo = sections_of(chosen or usable, quick, Deadline(60 * minutes))
    sections = [section for section, _ in todo]
    with progress_bar() as progress:
        task = progress.add_task("", total=len(todo))
        for section, function in todo:
            progress.update(task, description=section.title)
            section.status = "running"  # what the files say if the interpreter crashes in it
            write(folder, sections, options)
            section.run(function)
            progress.update(task, advance=1)
    paths = write(folder, sections, options)
    console = Console()
    for section in sections:
        console.print(f"{section.title}: [bold]{section.status}[/bold]", end="; ", highlight=False)
        console.print(without_home(section.summary), highlight=False, markup=False)
    console.print(f"Written: {paths[0]} and {paths[1]}. Please attach both to {_ISSUES}", highlight=False)

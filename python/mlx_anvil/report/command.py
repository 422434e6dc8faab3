"""``python -m mlx_anvil report``: runs the sections and writes the files."""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import click
import mlx.core as mx
from rich.console import Console

import mlx_anvil
from mlx_anvil._check import keep_float32_exact
from mlx_anvil._cli import progress_bar
from mlx_anvil.report import cases, compiler, markdown, ops, pipelines, system
from mlx_anvil.report.section import Deadline, Outcome, Section

# Of the JSON. A reader of another format is to refuse it.
FORMAT = 1


@dataclass
class Task:
    """A section, what runs it, and its weight when the time left is shared out."""

    section: Section
    function: Callable[[Deadline], Outcome]
    weight: int


def tasks_of(backends: Sequence[str], quick: bool) -> list[Task]:
    """All of them in their order. Those of a GPU weigh most: what they tell is what the report is for."""
    tasks = [
        Task(Section("system", "Machine and versions"), system.run, 0),
        Task(Section("compiler", "Metal source through Apple's compiler"), compiler.run, 3),
    ]
    for name in backends:
        weight = 3 if name in cases.GPUS else 1
        builds, checks = (partial(module.run, name, quick) for module in (pipelines, ops))
        tasks.append(Task(Section(f"pipelines/{name}", f"Pipelines, {name}"), builds, weight if name != "cpu" else 0))
        tasks.append(Task(Section(f"ops/{name}", f"Ops, {name}"), checks, weight))
    return tasks


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
    keep_float32_exact()
    mx.random.seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, object] = {"quick": quick, "seed": seed}
    tasks = tasks_of(chosen or usable, quick)
    sections = [task.section for task in tasks]
    deadline = Deadline(60 * minutes)
    with progress_bar() as progress:
        shown = progress.add_task("", total=len(tasks))
        for number, task in enumerate(tasks):
            progress.update(shown, description=task.section.title)
            task.section.status = "running"  # what the files say if the interpreter crashes in it
            write(folder, sections, options)
            share = task.weight / max(1, sum(later.weight for later in tasks[number:]))
            task.section.run(partial(task.function, deadline.part(share)))
            progress.update(shown, advance=1)
    paths = write(folder, sections, options)
    console = Console()
    for section in sections:
        console.print(f"{section.title}: [bold]{section.status}[/bold]", end="; ", highlight=False)
        console.print(without_home(section.summary), highlight=False, markup=False)
    console.print("Please attach both files to an issue of the kind 'Hardware report':", highlight=False)
    for path in paths:
        print(path)  # on one line, however long it is

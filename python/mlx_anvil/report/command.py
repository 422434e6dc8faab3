"""The command ``python -m mlx_anvil report``: runs the sections and writes the files."""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import click
import mlx.core as mx

import mlx_anvil
from mlx_anvil._check import keep_float32_exact
from mlx_anvil._cli import chosen_backends, console, progress_bar, say
from mlx_anvil.report import cases, compiler, markdown, ops, pipelines, system
from mlx_anvil.report.section import Deadline, Outcome, Section

# Version of the JSON. A reader must refuse other versions.
FORMAT = 1


@dataclass
class Task:
    """A section, the function that runs it, and its share of the remaining time."""

    section: Section
    function: Callable[[Deadline], Outcome]
    weight: int


def tasks_of(backends: Sequence[str], quick: bool) -> list[Task]:
    """All tasks, in order. Those of a GPU get most of the time, because the report is about GPUs."""
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
    """The text with the user's home folder replaced by ``~``."""
    home = str(Path.home())
    return text.replace(home, "~") if home != "/" else text


def write(folder: Path, sections: Sequence[Section], options: dict[str, object]) -> tuple[Path, Path]:
    """Rewrites both files, and returns their paths."""
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
    metavar="FOLDER",
    help="Folder for the two files. Default: the current one.",
)
@click.option("--backend", "chosen", multiple=True, metavar="BACKEND", help="Test only this backend. Repeatable.")
@click.option("--quick", is_flag=True, help="Run one small case per op, and measure no times.")
@click.option(
    "--minutes", type=click.FloatRange(min=0.1), default=9.0, show_default=True, metavar="FLOAT", help="Time limit."
)
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="INTEGER", help="Seed of the random inputs. Default: a new one."
)
def report(folder: Path, chosen: tuple[str, ...], quick: bool, minutes: float, seed: int | None) -> None:
    """Test this machine and write a report for an issue.

    Writes mlx-anvil-report.md and mlx-anvil-report.json. They contain versions, the chip, results and times, but no
    user names and no home folder. The exit status is 0 even if results are wrong.
    """
    backends = chosen_backends(chosen, cases.backends())
    seed = secrets.randbelow(2**31) if seed is None else seed
    keep_float32_exact()
    mx.random.seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, object] = {"quick": quick, "seed": seed}
    tasks = tasks_of(backends, quick)
    sections = [task.section for task in tasks]
    deadline = Deadline(60 * minutes)
    with progress_bar() as progress:
        shown = progress.add_task("", total=len(tasks))
        for number, task in enumerate(tasks):
            progress.update(shown, description=task.section.title)
            task.section.status = "running"  # stays in the files if the interpreter crashes
            write(folder, sections, options)
            share = task.weight / max(1, sum(later.weight for later in tasks[number:]))
            task.section.run(partial(task.function, deadline.part(share)))
            progress.update(shown, advance=1)
    paths = write(folder, sections, options)
    target = console()
    for section in sections:
        say(target, f"{section.title}: {section.status}; {without_home(section.summary)}")
    say(target, "Please attach both files to an issue of the kind 'Hardware report':")
    for path in paths:
        print(path)  # on one line, to be copied

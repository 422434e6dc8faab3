"""Runs every kernel under compute-sanitizer on an NVIDIA GPU.

  python tools/sanitize_cuda.py [--tool memcheck] [--processes 8]

It needs an installation with PTX (docs/cuda.md), MLX with CUDA, CUDA's compute-sanitizer, and the `sim` extra. The
latter finds a set of calls that launches every kernel (tests/metal_launches/cover.py); `--cover` reads them from a file
instead. MLX allocates from pools whose blocks are larger than the arrays, so this does not detect accesses just past an
array. The simulator's checks do.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck")
FINDING = 99  # exit status of compute-sanitizer after a finding


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def run(command: list[str], log: Path, seconds: float) -> int | None:
    """Returns the exit status, or None on a timeout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as output:
        try:
            return subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def summary(log: str) -> list[str]:
    """Returns compute-sanitizer's error lines with their counts, the most frequent first."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=========")]
    kinds = Counter(line for line in lines if line.startswith(("Invalid", "Error", "Race", "Barrier", "Program hit")))
    return [f"{count} x {line}" for line, count in kinds.most_common(5)]


@click.command()
@click.option(
    "--tool", "tools", multiple=True, type=click.Choice(TOOLS), help="Tool to run; may be repeated. Default: all."
)
@click.option("--processes", default=8, show_default=True, help="Processes that share the GPU.")
@click.option("--cover", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Output of cover.py.")
@click.option("--seconds", default=1200.0, show_default=True, help="Time limit per process.")
@click.option("--logs", type=click.Path(path_type=Path), help="Folder for the output of each process.")
def main(tools: tuple[str, ...], processes: int, cover: Path | None, seconds: float, logs: Path | None) -> None:
    """Runs every kernel under compute-sanitizer. Exits with 1 if it finds an error."""
    console = Console(soft_wrap=True)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if cover is None:
            cover = folder / "cover.json"
            if run(python("tests.metal_launches.cover"), cover, seconds) != 0:
                raise SystemExit(cover.read_text())
        for tool in tools or TOOLS:
            sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FINDING)]
            targets = {folder / f"{tool}_{part}.log": part for part in range(processes)}
            commands = {
                log: [*sanitizer, *python("tests.metal_launches.on_gpu", str(cover), str(part), str(processes))]
                for log, part in targets.items()
            }
            with ThreadPoolExecutor(processes) as pool:
                statuses = list(pool.map(lambda item: run(item[1], item[0], seconds), commands.items()))
            kernels = set()
            for log, status in zip(commands, statuses, strict=True):
                text = log.read_text()
                kernels.update(
                    line for line in text.splitlines() if line and not line.startswith("=") and " " not in line
                )
                if status != 0:
                    failed = True
                    what = "took too long" if status is None else f"exit status {status}"
                    console.print(f"[bold red]{tool}[/], part {targets[log]}: {what}", *summary(text), sep="\n  ")
            console.print(
                f"{tool}: {len(kernels)} kernels ran, {sum(status != 0 for status in statuses)} of {processes} processes failed"
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""How fast the simulator is: attention forward of 128 queries, 128 keys, head_dim 64 (MLX's own steel_attention, half,
one head, no checks) on one core and on two, and what compiling a kernel file costs, cold and from the cache.

    python bench/mslc/simulator.py [--rounds 15] [--save FILE]

One-core and two-core runs alternate, so that a busy machine hits both alike. Figures are the median and the quartiles;
the ratio is formed round by round. `least` is the fastest round: what the machine does when nothing else wants it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mlx_anvil._extras import missing

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

try:
    import numpy as np

    from mlx_anvil.mslc import Library, toolchain
    from tests.mslc.control.mlx_kernels import DECODE, assert_close, include_dir, library, source
    from tests.mslc.control.test_attention import ATTENTION_PARAMS, attention
except ModuleNotFoundError as error:
    raise missing(error, "test") from None

LENGTH, HEAD_DIM, BLOCK = 128, 64, 32
HEADERS = ["steel/attn/kernels/steel_attention.h"]
INSTANCES = [("attention", "attention", "half", BLOCK, BLOCK, HEAD_DIM, HEAD_DIM, 4, 1, "bool", "float")]
CONSTANTS = {200: True, 201: True, 300: False, 301: False, 302: False, 303: False}
TARGETS = {"one core": 15.0, "compile, cold": 2000.0, "compile, cached": 20.0}  # ms, of the project's plan


def attention_launch():
    """A function that runs the kernel on so many threads, after its result was compared with NumPy."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, LENGTH, HEAD_DIM)).astype(np.float16) for _ in range(3))
    out, scale, tiles = np.zeros_like(q), HEAD_DIM**-0.5, LENGTH // BLOCK
    params = np.zeros(1, ATTENTION_PARAMS)
    strides = [[LENGTH * HEAD_DIM, LENGTH * HEAD_DIM, HEAD_DIM]] * 4
    params[0] = (1, 1, HEAD_DIM, LENGTH, LENGTH, 1, scale, tiles, tiles, tiles, tiles, 0, 0, 0, strides)
    kernels = library(HEADERS, INSTANCES, CONSTANTS)

    def run(threads: int) -> None:
        kernels.run("attention", {0: q, 1: k, 2: v, 3: out, 4: params}, (tiles, 1, 1), (32, 4, 1), threads=threads)

    run(1)
    assert_close(DECODE["half"](out), attention(*(DECODE["half"](x) for x in (q, k, v)), scale), "half")
    return run


def milliseconds(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - start) * 1e3


def time_attention(rounds: int) -> dict[str, list[float]]:
    run = attention_launch()
    for threads in (1, 2):
        run(threads)
    times: dict[str, list[float]] = {"one core": [], "two cores": []}
    for round_number in range(rounds):
        order = list(times) if round_number % 2 == 0 else list(times)[::-1]
        for name in order:
            times[name].append(milliseconds(run, 1 if name == "one core" else 2))
    return times


def time_compiling(rounds: int) -> dict[str, list[float]]:
    """A cold compile finds the runtime built (that is once per installation), but nothing of the kernel."""
    text = source(HEADERS, INSTANCES)
    runtime = toolchain.build_runtime()
    times: dict[str, list[float]] = {"compile, cold": [], "compile, cached": []}
    kept = os.environ.get("MLX_ANVIL_CACHE")
    try:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as directory:
                os.environ["MLX_ANVIL_CACHE"] = directory
                shutil.copy(runtime, directory)
                for name in times:
                    defines = {"MLX_METAL_JIT": 1}
                    times[name].append(milliseconds(Library, text, [include_dir()], CONSTANTS, defines))
    finally:
        os.environ.pop("MLX_ANVIL_CACHE")
        if kept is not None:
            os.environ["MLX_ANVIL_CACHE"] = kept
    return times


def summary(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"median": median, "low": low, "high": high, "least": min(times), "rounds": len(times)}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    times = time_attention(arguments.rounds) | time_compiling(max(3, arguments.rounds // 5))
    ratio = summary([one / two for one, two in zip(times["one core"], times["two cores"], strict=True)])
    figures = {name: summary(values) for name, values in times.items()}

    table = Table(title="mslc simulator, ms")
    for heading in ("", "median", "quartiles", "least", "target"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, figure in figures.items():
        target = f"<= {TARGETS[name]:g}" if name in TARGETS else ""
        spread = f"{figure['low']:.1f} - {figure['high']:.1f}"
        table.add_row(name, f"{figure['median']:.1f}", spread, f"{figure['least']:.1f}", target)
    spread = f"{ratio['low']:.2f} - {ratio['high']:.2f}"
    table.add_row("two cores are faster by", f"{ratio['median']:.2f}x", spread, "", ">= 1.6x")
    Console().print(table)
    print(f"{processor()}, {os.cpu_count()} cores, load {load:.1f} at the start")
    if arguments.save:
        result = {
            "benchmark": "mslc simulator",
            "unit": "ms",
            "figures": figures,
            "speedup_two_cores": ratio,
            "processor": processor(),
            "cores": os.cpu_count(),
            "load_at_start": load,
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        arguments.save.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Memory and time of training one gated delta layer, by the length of the sequence, on the CPU.

    python bench/gated_delta_lengths.py                  # 128 to 65536 steps
    python bench/gated_delta_lengths.py --longest 4096
    python bench/plot.py                                 # then the picture and the table of docs/linear_attention.md

writes bench/results/gated_delta_lengths_cpu.json. The layer is that of mlx-lm's pull request 1870, which has Qwen3-Next's
shape: one sequence, 16 heads of q and k, 32 of v, 128 dims, bfloat16 arrays, float32 decays, rates and state. A call is
the forward pass and the gradients of all six arrays. mlx-lm's graph of MLX ops, ``gated_delta_ops``, is measured beside
it while it fits. Every length has a process of its own.

Peaks are memory beyond the arguments, gradients included: what the process holds, on Linux, where MLX counts less.
Scratch memory of our threads is none of MLX's arrays.
"""

import json
import subprocess
import sys
from functools import partial
from typing import Any

from harness import Timing, as_json, console_table, forget_peak, resident, write_results

import click
import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops
from rich.console import Console

import mlx_anvil
from gated_delta import backward, draw
from mlx_anvil.bench.timing import seconds_of

SHORTEST, WARM_UP = 128, 8
OPS = {"ours": mlx_anvil.gated_delta, "mlx-lm": gated_delta_ops}


def measured(label: str, steps: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds and peaks of the same calls: one at the longest length takes a minute, so none is spent on the peak."""
    call = partial(backward, OPS[label])
    call(draw(WARM_UP, getattr(mx, dtype), per_channel=False))  # starts threads, compiles mlx-lm's step
    arrays = draw(steps, getattr(mx, dtype), per_channel=False)
    mx.clear_cache()
    forget_peak()
    before, held = resident("VmRSS:"), mx.get_active_memory()
    seconds = [seconds_of(partial(call, arrays)) for _ in range(rounds)]
    counted = mx.get_peak_memory() - held
    return {"seconds": seconds, "mlx_peak": counted, "peak": max(counted, resident("VmHWM:") - before)}


def in_a_process(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise click.ClickException(f"{arguments}: exit {run.returncode}\n{run.stderr}")
    return dict(json.loads(run.stdout))


def row(steps: int, dtype: str, rounds: int, labels: list[str]) -> dict[str, Any]:
    found = {label: in_a_process(label, steps, dtype, rounds) for label in labels}
    return {
        "op": "forward + backward",
        "dtype": dtype,
        "shape": [steps],
        "peak_bytes": {label: one["peak"] for label, one in found.items()},
        "mlx_peak_bytes": {label: one["mlx_peak"] for label, one in found.items()},
        "seconds": {label: as_json(Timing.of(one["seconds"])) for label, one in found.items()},
    }


@click.command()
@click.option("--longest", type=click.IntRange(SHORTEST), default=65536, show_default=True, help="Lengths double.")
@click.option("--mlx-longest", default=512, show_default=True, help="Of mlx-lm's graph: 8 MiB a step. 0: none.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Calls per length.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--one", hidden=True, help="What a process of its own measures.")
def main(longest: int, mlx_longest: int, rounds: int, dtype: str, one: str | None) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    if one:
        print(json.dumps(measured(*json.loads(one))))
        return
    console, rows = Console(), []
    for steps in (SHORTEST << doublings for doublings in range((longest // SHORTEST).bit_length())):
        with console.status(f"{steps} steps"):
            rows.append(row(steps, dtype, rounds, list(OPS) if steps <= mlx_longest else ["ours"]))
    title = f"gated_delta, forward + backward, {dtype}, CPU"
    table = console_table(title, figures=("steps", "ours, s", "mlx-lm, s", "peak, MiB", "mlx-lm's, MiB"))
    for found in rows:
        times = [f"{found['seconds'][x]['median']:.3g}" if x in found["seconds"] else "" for x in OPS]
        peaks = [f"{found['peak_bytes'][x] / 2**20:,.0f}" if x in found["peak_bytes"] else "" for x in OPS]
        table.add_row(str(found["shape"][0]), *times, *peaks)
    console.print(table)
    console.print(f"written: {write_results('gated_delta_lengths_cpu', rows)}")


if __name__ == "__main__":
    main()

"""Memory and time of training one gated delta layer, by the length of the sequence, on the CPU.

    python bench/gated_delta_lengths.py                  # 128 to 65536 steps
    python bench/gated_delta_lengths.py --longest 4096
    python bench/plot.py                                 # then the picture and the table of docs/linear_attention.md

writes bench/results/gated_delta_lengths_cpu.json. The layer is that of mlx-lm's pull request 1870, which has Qwen3-Next's
shape: one sequence, 16 heads of q and k, 32 of v, 128 dims, bfloat16 arrays, float32 decays, rates and state. A call is
the forward pass and the gradients of all six arrays. mlx-lm's graph of MLX ops, ``gated_delta_ops``, is measured beside
it while it fits. Peaks are memory beyond the arguments; the gradients are part of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from harness import Timing, as_json, console_table, write_results

import click
import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops
from rich.console import Console

import mlx_anvil
from gated_delta import backward, draw
from mlx_anvil._check import dtype_name
from mlx_anvil.bench.timing import seconds_of

SHORTEST = 128
OPS = {"ours": mlx_anvil.gated_delta, "mlx-lm": gated_delta_ops}


def measured(call: Callable[[], None], rounds: int) -> tuple[Timing, int]:
    """Time and peak of the same calls: one at the longest length takes minutes, so none is spent on the peak alone."""
    seconds = []
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(rounds):
        seconds.append(seconds_of(call))
    peak = mx.get_peak_memory() - before
    mx.clear_cache()  # the next length has other sizes
    return Timing.of(seconds), peak


def row(steps: int, dtype: mx.Dtype, longest: dict[str, int], rounds: int) -> dict[str, Any]:
    arrays = draw(steps, dtype, per_channel=False)
    found = {
        label: measured(partial(backward, op, arrays), rounds) for label, op in OPS.items() if steps <= longest[label]
    }
    return {
        "op": "forward + backward",
        "dtype": dtype_name(dtype),
        "shape": [steps],
        "peak_bytes": {label: peak for label, (_, peak) in found.items()},
        "seconds": {label: as_json(timing) for label, (timing, _) in found.items()},
    }


@click.command()
@click.option("--longest", type=click.IntRange(SHORTEST), default=65536, show_default=True, help="Lengths double.")
@click.option("--mlx-longest", default=512, show_default=True, help="Of mlx-lm's graph: 8 MiB a step. 0: none.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Calls per length.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
def main(longest: int, mlx_longest: int, rounds: int, dtype: str) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    given = getattr(mx, dtype)
    limits = {"ours": longest, "mlx-lm": mlx_longest}
    lengths = [SHORTEST << doublings for doublings in range((longest // SHORTEST).bit_length())]
    console = Console()
    row(SHORTEST, given, limits, 1)  # starts threads, compiles mlx-lm's step
    rows = []
    for steps in lengths:
        with console.status(f"{steps} steps"):
            rows.append(row(steps, given, limits, rounds))
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

"""flash_attention on the CPU: forward, backward, decode and window against MLX, PyTorch and the machine's limits.

    python bench/flash_attention.py

writes bench/results/flash_attention_cpu.json. Figures are from one run on two threads (or as many as OMP_NUM_THREADS
says).

Products are counted as the algorithm needs them, over the pairs of query and key that see one another: two forward,
five backward; we compute seven where one pass over a head cannot keep all threads busy. The limit beside them is
PyTorch's float32 matrix product in the same run; bfloat16 may pass it where the machine multiplies bfloat16. A decode
is measured against reading buffers of as many bytes as the keys and values have, on all threads: with other keys and
values and another buffer each time, as in a model, where all other layers come between; and, "cached", with the same.

MLX has no fused kernel on the CPU; its gradients are left out at the large shape, where a call takes a minute.
Contestants that need more than two seconds are timed by a single call. Memory is the highest resident size of a process
of its own, less that before the call and less the results. Ours has a part that does not grow with the length: up to 4
MiB a thread for sums over all keys of a head, while they fit in that.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import as_json, console_table, in_turn, installed_torch, measure, ratio, write_results

import click
import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from mlx_anvil import _ext, flash_attention
from mlx_anvil._check import dtype_name
from mlx_anvil.reference import DTYPES

Call = Callable[[], Any]


class Problem(NamedTuple):
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int

    def shape(self, heads: int, length: int) -> tuple[int, int, int, int]:
        return (1, heads, length, self.head_dim)

    def __str__(self) -> str:
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        lengths = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len} of {self.kv_len}"
        return f"{heads} heads of {self.head_dim}, {lengths}"


SMALL = Problem(8, 8, 1024, 1024, 64)
LARGE = Problem(32, 8, 2048, 2048, 128)
LONG = Problem(8, 8, 4096, 4096, 64)
DECODE = Problem(32, 8, 1, 8192, 128)
DECODE_SETS = 6  # more than the caches of today's machines hold
WINDOW = 256


def make_arrays(problem: Problem, dtype: mx.Dtype) -> list[mx.array]:
    """q, k, v and the cotangent of the result."""
    shapes = [problem.shape(problem.q_heads, problem.q_len)] + [problem.shape(problem.kv_heads, problem.kv_len)] * 2
    arrays = [mx.random.normal(shape).astype(dtype) for shape in (*shapes, shapes[0])]
    mx.eval(arrays)
    return arrays


def ours(arrays: list[mx.array], backward: bool, **options: Any) -> Call:
    *qkv, d_out = arrays
    if backward:
        return lambda: mx.eval(mx.vjp(lambda *x: flash_attention(*x, **options), qkv, [d_out]))
    return lambda: mx.eval(flash_attention(*qkv, **options))


def mlx_call(arrays: list[mx.array], backward: bool, causal: bool) -> Call:
    *qkv, d_out = arrays
    scale = qkv[0].shape[-1] ** -0.5

    def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal" if causal else None)

    if backward:
        return lambda: mx.eval(mx.vjp(attention, qkv, [d_out]))
    return lambda: mx.eval(attention(*qkv))


def torch_contestants(arrays: list[mx.array], backward: bool, causal: bool) -> dict[str, Call]:
    """PyTorch where it is installed: with ``enable_gqa`` and, for grouped heads, with keys and values repeated."""
    torch = installed_torch()
    if torch is None:
        return {}
    torch.set_num_threads(_ext._max_threads())
    dtype = getattr(torch, dtype_name(arrays[0].dtype))
    q, k, v, d_out = (torch.from_numpy(np.array(x.astype(mx.float32))).to(dtype) for x in arrays)
    group = q.shape[1] // k.shape[1]
    attend = torch.nn.functional.scaled_dot_product_attention

    def grouped() -> Any:
        return attend(q, k, v, is_causal=causal, enable_gqa=group > 1)

    def repeated() -> Any:
        return attend(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=causal)

    def forward(function: Callable[[], Any]) -> None:
        with torch.no_grad():
            function()

    def both(function: Callable[[], Any]) -> None:
        torch.autograd.grad(function(), (q, k, v), d_out)

    if backward:
        for x in (q, k, v):
            x.requires_grad_()
    run = both if backward else forward
    contestants = {"PyTorch": lambda: run(grouped)}
    if group > 1 and not backward:
        contestants["PyTorch repeated"] = lambda: run(repeated)
    return contestants


def sgemm() -> tuple[Call, float] | None:
    """PyTorch's float32 matrix product, and its operations."""
    torch = installed_torch()
    if torch is None:
        return None
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: torch.mm(a, b), 2.0 * size**3


def timed(contestants: dict[str, Call], rivals: dict[str, Call], rounds: int) -> dict[str, Any]:
    """Columns of a row: the contestants' timings, and how many times faster "ours" is than each rival."""
    slow = {}
    for label, call in rivals.items():
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        if seconds > 2.0:
            slow[label] = seconds
    timings = measure(contestants | {x: call for x, call in rivals.items() if x not in slow}, rounds=rounds)
    mine = timings["ours"]
    speedup = {label: ratio(timings[label], mine) for label in rivals if label in timings}
    speedup |= {label: seconds / mine.median for label, seconds in slow.items()}
    return {
        "speedup": {label: round(speedup[label], 2) for label in rivals},
        "seconds": {label: as_json(t) for label, t in timings.items()},
        "seconds_of_one_call": {label: round(seconds, 3) for label, seconds in slow.items()},
    }


def visible_pairs(problem: Problem, causal: bool, window: int | None) -> int:
    last = np.arange(problem.q_len) + problem.kv_len - problem.q_len
    end = np.minimum(last, problem.kv_len - 1) + 1 if causal else np.full(problem.q_len, problem.kv_len)
    begin = np.zeros(problem.q_len, int) if window is None else np.maximum(0, last - window + 1)
    return int((end - begin).sum())


def common(direction: str, problem: Problem, dtype: mx.Dtype, mask: str) -> dict[str, Any]:
    return {
        "op": "flash_attention",
        "direction": direction,
        "dtype": dtype_name(dtype),
        "problem": str(problem),
        "shape": list(problem),
        "mask": mask,
    }


def run_products(problem: Problem, dtype: mx.Dtype, causal: bool, backward: bool, rounds: int) -> dict[str, Any]:
    arrays = make_arrays(problem, dtype)
    contestants = {"ours": ours(arrays, backward, mask="causal" if causal else None)}
    rivals = torch_contestants(arrays, backward, causal)
    gemm = sgemm()
    if gemm:
        contestants["sgemm"] = gemm[0]
    if causal:
        rivals["full"] = ours(arrays, backward)
    if problem is SMALL or not backward:
        rivals["MLX"] = mlx_call(arrays, backward, causal)
    row = common("forward + backward" if backward else "forward", problem, dtype, "causal" if causal else "none")
    row |= timed(contestants, rivals, rounds)
    products = 7 if backward else 2
    operations = 2.0 * products * problem.q_heads * problem.head_dim * visible_pairs(problem, causal, None)
    rate = operations / row["seconds"]["ours"]["median"]
    row["rate"] = f"{rate / 1e9:.0f} GFLOP/s"
    if causal:
        row["share_of_full"] = round(1 / row["speedup"]["full"], 3)
    if gemm:
        limit = gemm[1] / row["seconds"]["sgemm"]["median"]
        row["limit"] = f"sgemm {limit / 1e9:.0f} GFLOP/s"
        row["share_of_limit"] = round(rate / limit, 3)
    return row


def run_decode(dtype: mx.Dtype, cached: bool, rounds: int) -> dict[str, Any]:
    """One query. ``cached``: always the same keys and values; else of several sets the one not used for longest."""
    sets = [make_arrays(DECODE, dtype) for _ in range(1 if cached else DECODE_SETS)]
    total_bytes = sets[0][1].nbytes + sets[0][2].nbytes
    buffers = [np.asarray(mx.ones(total_bytes // 4)) for _ in sets]
    contestants = {
        "ours": in_turn([ours(arrays, False) for arrays in sets]),
        "read": in_turn([lambda buffer=buffer: _ext._read(buffer) for buffer in buffers]),
    }
    of_torch = [torch_contestants(arrays, False, False) for arrays in sets]
    rivals = {label: in_turn([calls[label] for calls in of_torch]) for label in of_torch[0]}
    rivals["MLX"] = in_turn([mlx_call(arrays, False, False) for arrays in sets])
    row = common("decode, cached" if cached else "decode", DECODE, dtype, "none")
    # The share by itself: beside calls a hundred times as long it would get few rounds.
    alone = measure(contestants, rounds=rounds, least_seconds=0.05)
    row |= timed({"ours": contestants["ours"]}, rivals, rounds)
    row["seconds"] |= {label: as_json(t) for label, t in alone.items()}
    row["rate"] = f"{total_bytes / alone['ours'].median / 1e9:.1f} GB/s"
    row["limit"] = f"read {total_bytes / alone['read'].median / 1e9:.1f} GB/s"
    row["share_of_limit"] = round(ratio(alone["read"], alone["ours"]), 3)
    return row


def run_window(dtype: mx.Dtype, backward: bool, rounds: int) -> dict[str, Any]:
    """A sliding window beside the full causal triangle."""
    arrays = make_arrays(LONG, dtype)
    contestants = {"ours": ours(arrays, backward, mask="causal", window_size=WINDOW)}
    rivals = {"causal": ours(arrays, backward, mask="causal")}
    row = common("forward + backward" if backward else "forward", LONG, dtype, f"causal, window {WINDOW}")
    row |= timed(contestants, rivals, rounds)
    row["share_of_causal"] = round(1 / row["speedup"]["causal"], 3)
    row["share_of_pairs"] = round(visible_pairs(LONG, True, WINDOW) / visible_pairs(LONG, True, None), 3)
    return row


# ---- memory ------------------------------------------------------------------------------------


def _status_bytes(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def extra_bytes(length: int, heads: int, composed: bool) -> int:
    """Highest resident size during forward + backward, beyond what is there before and the results."""
    problem = Problem(heads, heads, length, length, 64)
    warm = make_arrays(problem._replace(q_len=64, kv_len=64), mx.float32)
    make: Callable[..., Call] = (
        (lambda a: mlx_call(a, True, True)) if composed else (lambda a: ours(a, True, mask="causal"))
    )
    make(warm)()  # threads and their stacks
    mx.clear_cache()
    arrays = [
        mx.array(np.random.default_rng(0).standard_normal(x.size, np.float32).reshape(problem.shape(heads, length)))
        for x in make_arrays(problem, mx.float32)
    ]
    mx.eval(arrays)
    mx.clear_cache()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS:")
    make(arrays)()
    results = arrays[0].nbytes * 4
    return _status_bytes("VmHWM:") - before - results


def run_memory(length: int, heads: int) -> dict[str, Any]:
    def measured(composed: bool) -> int:
        argument = json.dumps([length, heads, composed])
        run = subprocess.run(
            [sys.executable, __file__, "--memory", argument],
            capture_output=True,
            text=True,
            check=True,
            # Freed arrays go back to the system at once, and are not mistaken for what the call needs.
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        )
        return int(run.stdout)

    problem = Problem(heads, heads, length, length, 64)
    row = common("memory of forward + backward", problem, mx.float32, "causal")
    row["extra_bytes"] = measured(False)
    row["extra_bytes_per_row_and_head"] = round(row["extra_bytes"] / (length * heads), 1)
    # The composed graph keeps several of these; beyond a few thousand keys it is not run.
    row["bytes_of_one_score_matrix"] = heads * length * length * 4
    if length <= 4096:
        row["extra_bytes_of_mlx"] = measured(True)
    return row


# ---- report ------------------------------------------------------------------------------------


def _rival_cells(row: dict[str, Any], labels: list[str]) -> tuple[str, str]:
    """Milliseconds and speed-up over the fastest of some rivals."""
    labels = [label for label in labels if label in row["speedup"]]
    if not labels:
        return "", ""
    best = min(labels, key=lambda label: row["speedup"][label])
    once = row["seconds_of_one_call"].get(best)
    seconds = row["seconds"][best]["median"] if once is None else once
    return f"{seconds * 1e3:.2f}", f"{row['speedup'][best]:.2f}"


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "flash_attention, CPU: medians in ms; speed-ups are of ours over each",
        words=("", "problem", "mask", "dtype"),
        figures=("ours", "rate", "limit", "share", "of full", "PyTorch", "x", "MLX", "x"),
    )
    for row in rows:
        cells = [row["direction"], row["problem"], row["mask"], row["dtype"]]
        cells.append(f"{row['seconds']['ours']['median'] * 1e3:.2f}")
        if "share_of_causal" in row:
            cells += ["", "time of causal", f"{row['share_of_causal']:.2f}", ""]
        else:
            cells += [
                row["rate"],
                row.get("limit", ""),
                str(row.get("share_of_limit", "")),
                str(row.get("share_of_full", "")),
            ]
        result.add_row(*cells, *_rival_cells(row, ["PyTorch", "PyTorch repeated"]), *_rival_cells(row, ["MLX"]))
    return result


def memory_table(rows: list[dict[str, Any]]) -> Table:
    result = console_table(
        "memory of forward + backward beyond inputs, results and gradients, float32, causal; MiB",
        figures=("problem", "ours", "bytes a row and head", "MLX", "one score matrix"),
    )
    for row in rows:
        of_mlx = row.get("extra_bytes_of_mlx")
        cells = [f"{row['extra_bytes'] / 2**20:.1f}", str(row["extra_bytes_per_row_and_head"])]
        cells += [
            "not run" if of_mlx is None else f"{of_mlx / 2**20:.0f}",
            f"{row['bytes_of_one_score_matrix'] / 2**20:.0f}",
        ]
        result.add_row(row["problem"], *cells)
    return result


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON; the tables go to stderr.")
@click.option("--memory", hidden=True, help="Measures one case of memory in this process.")
def main(rounds: int, as_json: bool, memory: str | None) -> None:
    """Runs the benchmark, prints its tables, writes its results."""
    mx.set_default_device(mx.cpu)
    if memory:
        print(extra_bytes(*json.loads(memory)))
        return
    mx.random.seed(0)
    console = Console(width=190, stderr=as_json)
    rows = []
    with console.status("timing"):
        for backward in (False, True):
            for problem in (SMALL, LARGE):
                for causal in (False, True):
                    rows += [run_products(problem, dtype, causal, backward, rounds) for dtype in DTYPES]
            rows += [run_window(dtype, backward, rounds) for dtype in DTYPES]
        rows += [run_decode(dtype, cached, 3 * rounds) for cached in (False, True) for dtype in DTYPES]
    console.print(table(rows))
    memory_rows = [run_memory(length, 2) for length in (1024, 4096, 16384)] if sys.platform == "linux" else []
    console.print(memory_table(memory_rows))
    if as_json:
        print(json.dumps(rows + memory_rows))
    console.print(f"written: {write_results('flash_attention_cpu', rows + memory_rows)}")


if __name__ == "__main__":
    main()

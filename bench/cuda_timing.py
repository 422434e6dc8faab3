"""Timing calls on an NVIDIA GPU, inside MLX's CUDA backend: by the host's clock and by PyTorch's profiler."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from harness import measure, ratio

import mlx.core as mx

Call = Callable[[], Any]
Row = dict[str, Any]

# One op is evaluated together with the next ones, as in a model, and batches of them are queued one after the other:
# while the GPU runs one, the host makes the next. Calls that do not wait for each other are branches of one CUDA graph:
# a hundred of them took about twice as long on an H200 as one after the other, kernels that only read as well; up to 40
# no longer.
SECONDS_A_BATCH, MOST_CALLS, BATCHES = 0.004, 32, 10


def queued(call: Call, steps: int) -> tuple[Callable[[], None], int]:
    """A function that makes several calls and waits for the last, and how many. Calls that are `steps`, of many ops,
    are batches by themselves."""

    def run(batches: int, calls: int) -> None:
        for _ in range(batches):
            mx.async_eval([call() for _ in range(calls)])
        mx.synchronize()

    for _ in range(3):
        run(1, 1)
    if steps:
        return lambda: run(steps, 1), steps
    start = time.perf_counter()
    run(1, 3)
    once = (time.perf_counter() - start) / 3
    calls = max(1, min(MOST_CALLS, int(SECONDS_A_BATCH / once)))
    return lambda: run(BATCHES, calls), BATCHES * calls


def copy_seconds(total_bytes: int) -> float | None:
    """A device copy that reads and writes so much in all; the fastest of several. None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    source = torch.empty(total_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 10e3)
    del source, target
    torch.cuda.empty_cache()
    return best


def peak_bytes(call: Call) -> int:
    """Beyond what is there before."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call())
    return mx.get_peak_memory() - before


def copy_rate() -> float | None:
    """Bytes a second, read and written, of a copy far larger than the cache."""
    total = 4 << 30
    seconds = copy_seconds(total)
    return total / seconds if seconds else None


def compare(
    what: str, contestants: dict[str, Call], *, work: dict[str, float], copy: float | None = None, steps: int = 0
) -> Row:
    """One row; `ours` is what the others are set against. `work`: bytes and flops of a call; `steps`: as for
    `queued`."""
    runs = {label: queued(call, steps) for label, call in contestants.items()}
    timings = measure({label: run for label, (run, _) in runs.items()}, rounds=7, least_seconds=0, budget_seconds=3)
    row: Row = {"what": what}
    for label, (_, count) in runs.items():
        row[f"{label}_us"] = round(timings[label].median / count * 1e6, 2)
        row[f"{label}_spread"] = round(timings[label].spread, 3)
        if kernels := kernels_of(runs[label][0]):
            row[f"{label}_gpu_us"] = round((max(k.end for k in kernels) - kernels[0].start) / count, 2)
    seconds = row["ours_us"] / 1e6
    for label, (_, count) in runs.items():
        if label != "ours":
            scale = runs["ours"][1] / count
            row[f"times_{label}"] = round(ratio(timings[label], timings["ours"]) * scale, 3)
            if "ours_gpu_us" in row:
                row[f"times_{label}_gpu"] = round(row[f"{label}_gpu_us"] / row["ours_gpu_us"], 3)
    if "flops" in work:
        row["tflops"] = round(work["flops"] / seconds / 1e12, 2)
    if "bytes" in work:
        row["bytes_per_second"] = round(work["bytes"] / seconds)
        if copy:
            row["share_of_copy"] = round(work["bytes"] / seconds / copy, 3)
            if "ours_gpu_us" in row:
                row["share_of_copy_gpu"] = round(work["bytes"] / row["ours_gpu_us"] * 1e6 / copy, 3)
    return row


def with_peers(row: Row, peers: dict[str, float]) -> Row:
    """The peers' time on the GPU beside ours there."""
    ours = row.get("ours_gpu_us")
    times = {f"times_{label}_gpu": round(us / ours, 3) for label, us in peers.items()} if ours else {}
    return row | {f"{label}_gpu_us": us for label, us in peers.items()} | times


class KernelRun(NamedTuple):
    """On the GPU, in microseconds."""

    start: float
    end: float


def kernels_of(run: Callable[[], None]) -> list[KernelRun]:
    """What the GPU runs, MLX's kernels and ours, as PyTorch's profiler sees them. Nothing without PyTorch."""
    try:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        return []
    run()
    mx.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        mx.synchronize()
    return sorted(
        KernelRun(event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )


def launches(call: Call) -> int:
    return len(kernels_of(lambda: mx.eval(call())))


def busy_us(call: Call) -> float:
    """How long the GPU runs kernels in a call, without the gaps between them. 0 without PyTorch."""
    busy, end = 0.0, float("-inf")
    for kernel in kernels_of(lambda: mx.eval(call())):
        busy += max(0.0, kernel.end - max(kernel.start, end))
        end = max(end, kernel.end)
    return round(busy, 1)

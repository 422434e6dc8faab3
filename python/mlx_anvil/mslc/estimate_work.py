"""What a launch asks of a GPU: the simulator's counts and the machine code's, brought together.

A launch may be too large to simulate. Then a part of its threadgroups is run (`sample`), on arrays that may be smaller
too, and stands for all: counts grow with the number of threadgroups, and distinct bytes too, up to a buffer's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

from .agx import AgxKernel, compile_agx
from .agx_flow import issue_of
from .compiler import PROFILED, Constants
from .preprocess import Source
from .profile import ATOMIC, ATOMIC_READ, DEVICE, READ, SIMD_WIDTH, THREADGROUP, WRITE, LaunchProfile
from .simulator import Library

LINE, PORT = 128, 64  # bytes of a cache line, and of what a core's first cache delivers in a cycle


@dataclass
class Work:
    """Totals of a launch. Cycles are of one unit: a scheduler, a cache's port, the banks of threadgroup memory."""

    kernel: str
    threadgroups: float
    threads: int  # of a threadgroup
    registers: int  # 16-bit halves
    threadgroup_memory: int  # bytes of a threadgroup
    bytes_read: float  # distinct, of device memory
    bytes_written: float
    cache_bytes: float  # distinct within a threadgroup, over all threadgroups
    port_cycles: float
    bank_cycles: float
    barriers: float
    simple: float
    complex: float
    complex_issued: float
    matrix_cycles: float  # of `simple`
    instructions: float
    rounds: float  # of loads from device memory that a SIMD group waits for
    spill_bytes: float
    unexplained: float  # see agx_flow.Issue

    @property
    def simdgroups(self) -> float:
        return self.threadgroups * -(-self.threads // SIMD_WIDTH)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_work(
    source: Source,
    kernel: str,
    buffers: Mapping[int | str, object],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    *,
    constants: Constants | None = None,
    threadgroup_memory: Mapping[int, int] | Sequence[int] = (),
    dispatch: str = "threadgroups",
    sample: Sequence[int] | None = None,
    sizes: Mapping[str, float] | None = None,
) -> Work:
    """Runs a launch, or a part of it, in the simulator, compiles its kernel, and counts what the launch does.

    Args:
        source: The Metal source.
        kernel: The name of the kernel.
        buffers: Arrays by index or by name, as for `Library.run`.
        grid: The size of the launch, in threadgroups or threads (`dispatch`).
        threadgroup: Threads per threadgroup.
        constants: Function constants, by index or by name.
        threadgroup_memory: Bytes of each threadgroup buffer.
        dispatch: "threadgroups" or "threads", the unit of `grid`.
        sample: A smaller grid to run instead; its counts are multiplied up to those of `grid`.
        sizes: Bytes of the real arrays, by parameter, where those of the sample are smaller.

    Returns:
        The work of the whole launch, for `estimate`.

    Raises:
        CompileError: The source does not compile.
        ValueError: There is no such kernel, or a buffer, constant or size does not fit it.
    """
    library = Library(source, constants=constants, options=PROFILED)
    run_grid = tuple(sample or grid)

    report = library.run(kernel, buffers, run_grid, threadgroup, threadgroup_memory, dispatch)
    assert report.profile is not None
    limits = {p.name: _bytes(buffers, p.index, p.name) for p in library.kernels[kernel].parameters}
    (compiled,) = compile_agx(source, [kernel], constants)
    ratio = _ratio(grid, run_grid)
    return combine_work(report.profile, compiled, prod(threadgroup), ratio, limits | dict(sizes or {}))


def combine_work(
    whole: LaunchProfile,
    compiled: AgxKernel,
    threads: int,
    ratio: float = 1.0,
    limits: Mapping[str, float] | None = None,
    laid_out: bool = False,
) -> Work:
    """`whole` is the profile of the launch, or of one in `ratio` of it. Threads of a threadgroup share what they read
    in the cache. `laid_out`: counts what is issued under a mask too, and exchanges between lanes say how often
    loops run, where there are any."""
    groups = whole.threadgroups
    simdgroups = groups * -(-threads // SIMD_WIDTH)
    counts = flow_counts(whole, simdgroups)
    if laid_out and not whole.matrix_multiplies:  # which are collective too
        counts["exchanges"] = whole.collectives / simdgroups
    issue = issue_of(compiled.code, counts, laid_out=laid_out)
    read, written = (_distinct(whole, name, ratio, limits or {}) for name in ("bytes_read", "bytes_written"))
    requested = LINE * whole.sum("ideal_transactions", DEVICE)
    spilled = simdgroups * issue.spill_bytes * SIMD_WIDTH
    shared = min(requested, sum(b.bytes_of_threadgroups for b in whole.buffers if b.memory == DEVICE))
    return Work(
        kernel=whole.kernel,
        threadgroups=groups * ratio,
        threads=threads,
        registers=compiled.registers,
        threadgroup_memory=whole.threadgroup_memory,
        bytes_read=read,
        bytes_written=written,
        cache_bytes=ratio * shared,
        port_cycles=ratio * (_port_cycles(whole, simdgroups * issue.accesses) + spilled / PORT),
        bank_cycles=ratio * whole.sum("transactions", THREADGROUP),
        barriers=ratio * whole.barriers,
        unexplained=issue.unexplained,
        **{name: ratio * simdgroups * getattr(issue, name) for name in _ISSUED},
    )


_ISSUED = ("simple", "complex", "complex_issued", "matrix_cycles", "instructions", "rounds", "spill_bytes")


def flow_counts(profile: LaunchProfile, simdgroups: float) -> dict[str, float]:
    """What agx_flow weighs blocks by: of a SIMD group, bytes of one of its threads."""

    def bytes_of(memory: str, *kinds: str) -> float:
        chosen = [s for s in profile.sites if s.memory == memory and s.kind in kinds and s.lanes]
        return sum(s.accesses * s.bytes / s.lanes for s in chosen) / simdgroups

    return {
        "device read": bytes_of(DEVICE, READ, ATOMIC_READ),
        "device written": bytes_of(DEVICE, WRITE, ATOMIC),
        "threadgroup read": bytes_of(THREADGROUP, READ, ATOMIC_READ),
        "threadgroup written": bytes_of(THREADGROUP, WRITE, ATOMIC),
        "matrix": profile.matrix_multiplies / simdgroups,
        "barriers": profile.barriers / profile.threadgroups,
    }


def _port_cycles(profile: LaunchProfile, instructions: float) -> float:
    """A line a cycle, and 64 bytes a cycle. Loads that stand side by side in the source are one of `instructions`."""
    device = [site for site in profile.sites if site.memory == DEVICE]
    merged = max(1.0, sum(site.accesses for site in device) / max(instructions, 1.0))
    lines = sum(site.transactions for site in device) / merged
    return max(lines, sum(min(site.bytes, site.ideal_transactions * LINE) for site in device) / PORT)


def _distinct(profile: LaunchProfile, name: str, ratio: float, limits: Mapping[str, float]) -> float:
    total = 0.0
    for buffer in profile.buffers:
        if buffer.memory == DEVICE:
            grown = getattr(buffer, name) * ratio
            total += min(grown, limits[buffer.name]) if buffer.name in limits else grown
    return total


def _bytes(buffers: Mapping[int | str, object], index: int, name: str) -> float:
    bound = buffers.get(index, buffers.get(name))
    return float(bound.nbytes) if isinstance(bound, np.ndarray) else float("inf")


def _ratio(grid: Sequence[int], part: Sequence[int]) -> float:
    return prod(grid) / prod(part)

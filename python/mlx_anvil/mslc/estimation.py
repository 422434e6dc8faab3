"""A model of a launch's time on Apple's GPUs: `python -m mlx_anvil.mslc estimate`.

An estimate is computed from counts (estimate_work.py) and published numbers of chips (chips.json). Nothing is measured.
Five parameters are fitted to published times of MLX's kernels (validation.json), half of which are held out. A chip is
only estimated if such times exist for it, and its error there goes with every estimate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from math import ceil, exp, log
from pathlib import Path
from statistics import median
from typing import Any

from .estimate_work import Work
from .profile import SIMD_WIDTH

_BANKS_BYTES = 128  # that the simulator's banks deliver in a cycle
_BARRIER_CYCLES = 40  # for which a threadgroup waits; assumed
FEWEST_TIMINGS = 3  # of a chip


class EstimateError(ValueError):
    """What was asked for cannot be estimated. The message starts with `[mslc.estimate]`."""

    def __init__(self, message: str):
        super().__init__(f"[mslc.estimate] {message}")


@dataclass(frozen=True)
class Core:
    """What the cores of all chips have in common."""

    schedulers: int
    register_bytes: int
    threadgroup_bytes: int
    most_threads: int
    least_threads: int
    port_bytes_per_cycle: float
    gpu_bytes_per_cycle: float  # from the cache that cores share
    bank_bytes_per_cycle: float
    slc_over_dram: float  # bandwidth of the system-level cache
    simdgroups_for_full_rate: int
    simdgroups_for_full_products: int
    launch_us: float


@dataclass(frozen=True)
class Chip:
    name: str
    cores: int
    ghz: float
    dram_gb_s: float
    slc_mb: float
    uncertain: tuple[str, ...] = ()  # numbers that are not published, or on which sources differ

    def __str__(self) -> str:
        return f"{self.name}, {self.cores} cores"


@dataclass(frozen=True)
class Parameters:
    """What is fitted, for all chips together."""

    memory: float  # of the bandwidth of memory that a launch reaches
    issue: float  # of the issue slots
    overlap: float  # exponent by which resources overlap at full occupancy; 1: not at all
    latency: float  # cycles for which a SIMD group waits for device memory
    call_us: float  # of a call that is waited for, besides the launch


@dataclass
class Estimate:
    """Microseconds of a launch; of each resource if it were alone; which one is longest; and the error to expect."""

    chip: Chip
    kernel: str
    microseconds: float
    bound: str
    resources: dict[str, float]
    simdgroups_per_core: int
    error: float  # typical factor between published times and estimates, minus 1
    worst: float
    timings: int

    @property
    def low(self) -> float:
        return self.microseconds / (1 + self.error)

    @property
    def high(self) -> float:
        return self.microseconds * (1 + self.error)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Timing:
    """A published time of a kernel."""

    chip: str
    cores: int
    work: str
    milliseconds: float
    source: str
    published: str = ""  # what the source says, if it is no time
    mlx: str = ""
    synced: bool = False  # every call was waited for
    warm: bool = False  # the same arrays again and again
    held: bool = False  # not used for the fit
    note: str = ""


# ---- data


def _read(name: str) -> Any:
    return json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


@cache
def chips() -> dict[str, dict[str, Any]]:
    """Chips by name, as in chips.json: every number with its source."""
    return _read("chips.json")["chips"]


@cache
def core() -> Core:
    return Core(**{name: number["value"] for name, number in _read("chips.json")["core"].items()})


@cache
def validation() -> tuple[Parameters, dict[str, Work], tuple[Timing, ...]]:
    """The fitted parameters, the launches that they were fitted with, and their published times."""
    data = _read("validation.json")
    works = {name: Work(**counts) for name, counts in data["works"].items()}
    return Parameters(**data["parameters"]), works, tuple(Timing(**timing) for timing in data["timings"])


def find_chip(name: str, cores: int | None = None) -> Chip:
    """Returns a chip by its name, such as "M2 Max", with as many cores as its largest variant has by default."""
    known = {known.lower().replace(" ", ""): known for known in chips()}
    key = name.lower().removeprefix("apple").replace(" ", "").replace("-", "").replace("_", "")
    if key not in known:
        raise EstimateError(f"there is no estimate for '{name}': the model was not validated with times of it; "
                            f"allowed: {', '.join(chips())}.")  # fmt: skip
    numbers = chips()[known[key]]
    variants = numbers["cores"]["value"]
    if cores is not None and not 1 <= cores <= max(variants):
        raise EstimateError(f"an {known[key]} has {' or '.join(map(str, variants))} cores, not {cores}")
    values = {field: numbers[field]["value"] for field in ("ghz", "dram_gb_s", "slc_mb")}
    uncertain = tuple(field for field, number in numbers.items() if "range" in number)
    return Chip(known[key], cores or max(variants), uncertain=uncertain, **values)


# ---- the model


def simdgroups_per_core(work: Work, core: Core) -> int:
    """How many SIMD groups of a launch a core holds at once: by registers and threadgroup memory."""
    threads = core.register_bytes // (2 * max(work.registers, 1))
    threads = min(max(threads, core.least_threads), core.most_threads)
    groups = threads // work.threads
    if work.threadgroup_memory:
        groups = min(groups, core.threadgroup_bytes // work.threadgroup_memory)
    return max(groups, 1) * ceil(work.threads / SIMD_WIDTH)


def resources(work: Work, chip: Chip, parameters: Parameters, core: Core, *, warm: bool = False) -> dict[str, float]:
    """Microseconds that each resource needs for a launch, as if it were the only one."""
    active = min(chip.cores, work.threadgroups)
    per_core = work.threadgroups / active
    uneven = ceil(per_core) / per_core  # the last threadgroups leave cores without work
    cycles = uneven / (active * chip.ghz * 1e3)  # microseconds of a cycle that all active cores share
    resident = min(simdgroups_per_core(work, core), ceil(work.simdgroups / active))
    slots = core.schedulers * parameters.issue
    issuing = slots * min(1.0, resident / core.simdgroups_for_full_rate)
    multiplying = slots * min(1.0, resident / core.simdgroups_for_full_products)
    moved = work.bytes_read + work.bytes_written
    bandwidth = chip.dram_gb_s * parameters.memory
    if warm and moved <= chip.slc_mb * 1e6 * _WARM_SHARE:
        bandwidth *= core.slc_over_dram
    waits = work.rounds * parameters.latency + work.barriers * _BARRIER_CYCLES * ceil(work.threads / SIMD_WIDTH)
    arithmetic = work.simple - work.matrix_cycles + work.complex_issued
    return {
        "memory": moved / (bandwidth * 1e3),
        "shared cache": work.cache_bytes / core.gpu_bytes_per_cycle * cycles,
        "core's cache": work.port_cycles * _PORT_BYTES / core.port_bytes_per_cycle * cycles,
        "threadgroup memory": work.bank_cycles * _BANKS_BYTES / core.bank_bytes_per_cycle * cycles,
        "matrix products": work.matrix_cycles / multiplying * cycles,
        "instructions": arithmetic / issuing * cycles,
        "complex instructions": work.complex / issuing * cycles,
        "latency": waits / resident * cycles,
    }


_PORT_BYTES = 64  # by which estimate_work counts
_WARM_SHARE = 1.1  # of the system-level cache; the M3 Max kept 50 of 48 MB (mlx-3852)


def modelled(
    work: Work, chip: Chip, parameters: Parameters, core: Core, *, synced: bool = False, warm: bool = False
) -> float:
    """Microseconds of a launch: its resources overlap the better, the more SIMD groups a core holds."""
    alone = resources(work, chip, parameters, core, warm=warm)
    full = min(1.0, simdgroups_per_core(work, core) / core.simdgroups_for_full_rate)
    power = 1 + (parameters.overlap - 1) * full
    total = sum(time**power for time in alone.values()) ** (1 / power)
    return total + core.launch_us + (parameters.call_us if synced else 0.0)


def ratio(timing: Timing, works: Mapping[str, Work], parameters: Parameters) -> float:
    """Estimate over published time."""
    chip = find_chip(timing.chip, timing.cores)
    estimated = modelled(works[timing.work], chip, parameters, core(), synced=timing.synced, warm=timing.warm)
    return estimated / (1e3 * timing.milliseconds)


def typical_error(ratios: Iterable[float]) -> float:
    """The median factor by which estimates are off, minus 1: 0.1 is 10 % too long or too short."""
    return exp(median(abs(log(r)) for r in ratios)) - 1


@cache
def chip_error(name: str) -> tuple[float, float, int]:
    """The typical and the largest error of a chip's estimates, and of how many published times."""
    parameters, works, timings = validation()
    ratios = [ratio(timing, works, parameters) for timing in timings if timing.chip == name]
    if len(ratios) < FEWEST_TIMINGS:
        raise EstimateError(f"there is no estimate for {name}: {len(ratios)} of its times are published, "
                            f"too few to say how wrong an estimate would be")  # fmt: skip
    return typical_error(ratios), exp(max(abs(log(r)) for r in ratios)) - 1, len(ratios)


def estimate(work: Work, chip: str, cores: int | None = None, *, warm: bool = False) -> Estimate:
    """Estimates the time of a launch.

    Args:
      work: what the launch asks, from `measure_work`.
      chip: a name such as "M1 Pro".
      cores: of the GPU; those of the largest variant by default.
      warm: whether what the launch reads is in the system-level cache if it fits.

    Returns:
      The estimate, with the error of the chip's published times.

    Raises:
      EstimateError: the chip is unknown, or nothing was published to validate estimates for it.
    """
    found = find_chip(chip, cores)
    error, worst, count = chip_error(found.name)
    parameters, _, _ = validation()
    alone = resources(work, found, parameters, core(), warm=warm)
    time = modelled(work, found, parameters, core(), warm=warm)
    named = {**alone, "launch": core().launch_us}
    bound = max(named, key=lambda name: named[name])
    resident = simdgroups_per_core(work, core())
    return Estimate(found, work.kernel, time, bound, alone, resident, error, worst, count)

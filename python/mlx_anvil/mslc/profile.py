"""Memory traffic of a launch, counted per SIMD group (runtime/profile.h), and the metrics derived from it.

The metrics describe the source, not the hardware. An access is what one statement requests from memory. The model
assumes 128-byte cache lines and threadgroup memory with 32 banks of 4 bytes. Use the metrics to compare kernels and to
find scattered accesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from . import abi
from .entry import BUFFER, Kernel

SIMD_WIDTH = 32
DEVICE, CONSTANT, THREADGROUP = "device", "constant", "threadgroup"
READ, WRITE, ATOMIC_READ, ATOMIC = KINDS = ("read", "write", "atomic read", "atomic")
Place = tuple[str, int, int]


@dataclass
class Site:
    """The accesses to one buffer from one position in the source."""

    file: str
    line: int
    column: int
    memory: str  # DEVICE, CONSTANT or THREADGROUP
    buffer: str  # parameter name; "" for threadgroup memory
    kind: str
    accesses: int = 0  # counted per SIMD group
    lanes: int = 0
    bytes: int = 0
    transactions: int = 0  # cache lines touched; cycles of the banks for threadgroup memory
    ideal_transactions: int = 0  # for the same bytes without gaps or bank conflicts

    @property
    def excess(self) -> int:
        return self.transactions - self.ideal_transactions


@dataclass
class BufferUse:
    """The unique bytes of a buffer that were accessed."""

    name: str
    memory: str
    bytes_read: int
    bytes_written: int
    bytes_of_threadgroups: int = 0  # unique in each threadgroup, read and written, summed over all


@dataclass
class LaunchProfile:
    """The memory traffic of one launch: sites in the source, bytes per buffer, and other counts."""

    kernel: str
    sites: list[Site] = field(default_factory=list)
    buffers: list[BufferUse] = field(default_factory=list)
    launches: int = 1
    threadgroups: int = 0
    barriers: int = 0
    collectives: int = 0
    divergent_collectives: int = 0
    collective_lanes: int = 0
    threadgroup_memory: int = 0
    matrix_multiplies: int = 0
    transcendentals: int = 0

    def sum(self, quantity: str, memory: str, *kinds: str) -> int:
        """Adds up a field of the sites.

        Args:
          quantity: the field's name.
          memory: counts only sites of this memory.
          *kinds: count only sites of these kinds; all kinds by default.

        Returns:
          The sum.
        """
        return sum(getattr(s, quantity) for s in self.sites if s.memory == memory and (not kinds or s.kind in kinds))

    def metrics(self) -> dict[str, float | None]:
        """Derives the metrics that METRICS describes.

        Returns:
          Metrics by name. A ratio is None if its denominator is zero.
        """
        device = [buffer for buffer in self.buffers if buffer.memory == DEVICE]
        accesses = sum(site.accesses for site in self.sites)
        return {
            "threadgroups": self.threadgroups,
            "device_bytes_read": self.sum("bytes", DEVICE, READ, ATOMIC_READ),
            "device_bytes_read_unique": sum(buffer.bytes_read for buffer in device),
            "device_bytes_written": self.sum("bytes", DEVICE, WRITE, ATOMIC),
            "device_bytes_written_unique": sum(buffer.bytes_written for buffer in device),
            "device_accesses": self.sum("accesses", DEVICE),
            "device_lines": self.sum("transactions", DEVICE),
            "lines_per_access": _ratio(self.sum("transactions", DEVICE), self.sum("accesses", DEVICE)),
            "ideal_lines_per_access": _ratio(self.sum("ideal_transactions", DEVICE), self.sum("accesses", DEVICE)),
            "coalescing": _ratio(self.sum("ideal_transactions", DEVICE), self.sum("transactions", DEVICE)),
            "device_atomics": self.sum("lanes", DEVICE, ATOMIC_READ, ATOMIC),
            "constant_bytes_read": self.sum("bytes", CONSTANT),
            "threadgroup_bytes_read": self.sum("bytes", THREADGROUP, READ, ATOMIC_READ),
            "threadgroup_bytes_written": self.sum("bytes", THREADGROUP, WRITE, ATOMIC),
            "threadgroup_accesses": self.sum("accesses", THREADGROUP),
            "bank_conflicts": self.sum("excess", THREADGROUP),
            "threadgroup_memory": self.threadgroup_memory,
            "barriers": self.barriers,
            "collectives": self.collectives,
            "divergent_collectives": self.divergent_collectives,
            "matrix_multiplies": self.matrix_multiplies,
            "transcendentals": self.transcendentals,
            "access_utilisation": _ratio(sum(site.lanes for site in self.sites), SIMD_WIDTH * accesses),
            "collective_utilisation": _ratio(self.collective_lanes, SIMD_WIDTH * self.collectives),
        }

    def to_json(self) -> dict[str, Any]:
        """Converts the profile to objects for `json.dumps`.

        Returns:
          The kernel, its launches, metrics, buffers and sites.
        """
        return {
            "kernel": self.kernel,
            "launches": self.launches,
            "metrics": self.metrics(),
            "buffers": [asdict(buffer) for buffer in self.buffers],
            "sites": [asdict(site) for site in self.sites],
        }


# Title and unit of each metric, in display order.
METRICS: dict[str, tuple[str, str]] = {
    "threadgroups": ("threadgroups", ""),
    "device_bytes_read": ("device bytes read, requested", "bytes"),
    "device_bytes_read_unique": ("device bytes read, unique", "bytes"),
    "device_bytes_written": ("device bytes written, requested", "bytes"),
    "device_bytes_written_unique": ("device bytes written, unique", "bytes"),
    "device_accesses": ("device accesses of SIMD groups", ""),
    "device_lines": ("128-byte lines touched", ""),
    "lines_per_access": ("lines per access", "ratio"),
    "ideal_lines_per_access": ("lines per access if packed", "ratio"),
    "coalescing": ("coalescing", "share"),
    "device_atomics": ("device atomics", ""),
    "constant_bytes_read": ("constant bytes read", "bytes"),
    "threadgroup_bytes_read": ("threadgroup bytes read", "bytes"),
    "threadgroup_bytes_written": ("threadgroup bytes written", "bytes"),
    "threadgroup_accesses": ("threadgroup accesses of SIMD groups", ""),
    "bank_conflicts": ("bank conflicts (extra cycles)", ""),
    "threadgroup_memory": ("threadgroup memory", "bytes"),
    "barriers": ("threadgroup barriers", ""),
    "collectives": ("SIMD-group operations", ""),
    "divergent_collectives": ("of them divergent", ""),
    "matrix_multiplies": ("8x8x8 matrix multiplies", ""),
    "transcendentals": ("transcendental functions (lanes)", ""),
    "access_utilisation": ("SIMD utilisation at accesses", "share"),
    "collective_utilisation": ("SIMD utilisation at operations", "share"),
}


def read_profile(
    raw: abi.Profile, kernel: Kernel, report: abi.Report, place_of: Callable[[int], Place]
) -> LaunchProfile:
    """Builds a profile from the runtime's counts. Compiled copies of one source position are merged into one site."""
    parameters = {p.index: p for p in kernel.parameters if p.kind == BUFFER}
    memories = {i: CONSTANT if "constant" in p.type.split() else DEVICE for i, p in parameters.items()}
    sites: dict[tuple[Any, ...], Site] = {}
    for counted in raw.sites[: raw.site_count]:
        memory = memories.get(counted.buffer, DEVICE) if counted.buffer >= 0 else THREADGROUP
        name = parameters[counted.buffer].name if counted.buffer in parameters else ""
        key = (*place_of(counted.pc), memory, name, KINDS[counted.kind])
        site = sites.setdefault(key, Site(*key))
        for quantity in ("accesses", "lanes", "bytes", "transactions", "ideal_transactions"):
            setattr(site, quantity, getattr(site, quantity) + getattr(counted, quantity))
    # The simulator compiles an atomic read-modify-write to a load and a compare-exchange at one position. Count them as
    # one access.
    for key in [key for key in sites if key[-1] == ATOMIC]:
        sites.pop((*key[:-1], ATOMIC_READ), None)
    return LaunchProfile(
        kernel.name,
        sorted(sites.values(), key=lambda s: (-s.excess, -s.transactions, s.file, s.line, s.column)),
        [
            BufferUse(
                parameter.name,
                memories[index],
                raw.bytes_read[index],
                raw.bytes_written[index],
                raw.bytes_of_threadgroups[index],
            )
            for index, parameter in sorted(parameters.items())
        ],
        threadgroups=report.threadgroups,
        barriers=report.barriers,
        collectives=report.collectives,
        divergent_collectives=report.divergent_collectives,
        collective_lanes=raw.collective_lanes,
        threadgroup_memory=report.threadgroup_memory,
        **dict(zip(abi.COUNT_KINDS, raw.counts, strict=True)),
    )


def combine(profiles: Sequence[LaunchProfile]) -> LaunchProfile:
    """Merges several launches: adds their counts and takes the largest threadgroup memory.

    Unique bytes are added too, since one launch's data may have left the cache before the next."""
    kernels = list(dict.fromkeys(profile.kernel for profile in profiles))
    total = LaunchProfile(" + ".join(kernels), launches=0)
    for profile in profiles:
        total.sites += profile.sites
        total.buffers += profile.buffers
        for count in _counts(profile):
            setattr(total, count, getattr(total, count) + getattr(profile, count))
    total.threadgroup_memory = max((profile.threadgroup_memory for profile in profiles), default=0)
    return total


def by_kernel(profiles: Iterable[LaunchProfile]) -> list[LaunchProfile]:
    """Merges the launches of each kernel into one profile."""
    groups: dict[str, list[LaunchProfile]] = {}
    for profile in profiles:
        groups.setdefault(profile.kernel, []).append(profile)
    return [combine(group) for group in groups.values()]


def _counts(profile: LaunchProfile) -> list[str]:
    return [f.name for f in fields(profile) if isinstance(getattr(profile, f.name), int)]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None

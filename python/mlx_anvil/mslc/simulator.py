"""Runs Metal kernels on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from . import abi
from .compiler import UNCHECKED, Compiled, Constants, Options, compile_library
from .diagnostics import author_words
from .entry import BUFFER, THREADGROUP, Kernel
from .line_table import LineTable
from .preprocess import Source
from .profile import LaunchProfile, read_profile

DEFAULT_STEP_LIMIT = 200_000_000


@dataclass
class Finding:
    """An error of a kernel, with its position in the source if known."""

    kind: str
    message: str
    kernel: str
    file: str = ""
    line: int = 0
    column: int = 0
    threadgroup: tuple[int, int, int] = (0, 0, 0)
    thread: int = -1
    other_thread: int = -1
    other_file: str = ""  # other access of a race
    other_line: int = 0
    other_column: int = 0
    buffer: int = -1
    offset: int = 0
    size: int = 0
    count: int = 1

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}: " if self.file else ""
        if self.other_file:
            place_of_other = f"{self.other_file}:{self.other_line}:{self.other_column}"
            where = f" (the other access: {place_of_other})"
        else:
            where = ""
        where += f" [kernel {self.kernel}, threadgroup {self.threadgroup}"
        where += f", thread {self.thread}]" if self.thread >= 0 else "]"
        return f"{place}{self.kind}: {self.message}{where}"


@dataclass
class Report:
    """The results of one launch."""

    findings: list[Finding] = field(default_factory=list)
    threadgroups: int = 0
    barriers: int = 0
    collectives: int = 0
    divergent_collectives: int = 0
    threadgroup_memory: int = 0
    profile: LaunchProfile | None = None  # set for libraries compiled with options=PROFILED


class SimulationError(RuntimeError):
    """A launch was stopped, or a check failed. The contents of its outputs are undefined."""

    def __init__(self, findings: list[Finding]):
        super().__init__("\n".join(str(f) for f in findings) or "the launch was stopped")
        self.findings = findings


class Library:
    """The kernels of one Metal source, compiled for this machine.

    Args:
      source: a path, or the text of a file.
      include_dirs: where to look for included files, after the folder of the source.
      constants: values of function constants, by index or name.
      defines: macros.
      options: `UNCHECKED`, `CHECKED` or `PROFILED`.

    Raises:
      CompileError: the source is not valid Metal. The diagnostics refer to the author's source.
      ToolchainError: there is no compiler, or this is not Linux.
    """

    def __init__(
        self,
        source: str | Path | Source,
        include_dirs: Sequence[str | Path] = (),
        constants: Constants | None = None,
        defines: Mapping[str, object] | None = None,
        options: Options = UNCHECKED,
    ):
        if not isinstance(source, Source):
            source = Source.load(source, include_dirs, defines)
        self.compiled: Compiled = compile_library(source, constants, options)
        self.options = options
        self.kernels: dict[str, Kernel] = {kernel.name: kernel for kernel in self.compiled.module.kernels}
        self._library = ctypes.CDLL(str(self.compiled.path))
        abi.declare_functions(self._library)
        count = ctypes.c_uint()
        table = self._library.mslc_kernels(ctypes.byref(count))
        self._table = {table[i].name.decode(): ctypes.pointer(table[i]) for i in range(count.value)}

    def max_threads(self, kernel: str) -> int:
        """Returns the kernel's `max_total_threads_per_threadgroup`.

        Args:
          kernel: the kernel's host name.

        Returns:
          The limit, or 0 if the kernel sets none.
        """
        return self._table[kernel].contents.max_threads

    def run(
        self,
        kernel: str,
        buffers: Mapping[int | str, object],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        threadgroup_memory: Mapping[int, int] | Sequence[int] = (),
        dispatch: str = "threadgroups",
        seed: int = 0,
        threads: int = 0,
        step_limit: int = DEFAULT_STEP_LIMIT,
    ) -> Report:
        """Launches a kernel and waits for it.

        Args:
          kernel: the kernel's host name.
          buffers: binding index (or parameter name) to a contiguous array, written in place; an int, float or bytes
            is bound as a constant (int32, float32). Alignment checks assume that an array is aligned to 256 bytes, like
            a Metal buffer, and that a view starts at its offset in the array.
          grid: threadgroups, or threads with `dispatch="threads"`; up to three sizes.
          threadgroup: threads per threadgroup; up to three sizes.
          threadgroup_memory: bytes of each `threadgroup` parameter, by index or in order.
          dispatch: `"threadgroups"` or `"threads"`.
          seed: a value other than 0 shuffles the schedule.
          threads: number of host threads; 0 uses all cores.
          step_limit: stops a launch after this many steps, because a kernel may never end.

        Returns:
          The counts of the launch, and its findings if the library does not raise for them.

        Raises:
          ValueError: the kernel, a buffer or `dispatch` does not exist, or a buffer, function constant or length is
            missing.
          SimulationError: the launch was stopped, or a check failed.
        """
        if kernel not in self.kernels:
            raise ValueError(f"no kernel named '{kernel}' in {self.compiled.source.name}: {', '.join(self.kernels)}")
        self._check_constants(self.kernels[kernel])
        if dispatch not in ("threadgroups", "threads"):
            raise ValueError(f"dispatch must be 'threadgroups' or 'threads', not {dispatch!r}")
        arrays = self._bind(self.kernels[kernel], buffers)
        bound = (abi.Buffer * (max(arrays, default=-1) + 1))()
        for index, array in arrays.items():
            bound[index] = abi.Buffer(array.ctypes.data, array.nbytes, _offset(array))
        lengths = _lengths(threadgroup_memory)
        self._check_threadgroup_memory(self.kernels[kernel], lengths)
        profile = abi.Profile()
        launch = abi.Launch(
            struct_size=ctypes.sizeof(abi.Launch),
            flags=_flags(dispatch, self.options),
            kernel=self._table[kernel],
            buffers=bound,
            buffer_count=len(bound),
            threadgroup_buffer_count=len(lengths),
            threadgroup_lengths=(ctypes.c_uint * len(lengths))(*lengths),
            grid=_size(grid),
            threadgroup_size=_size(threadgroup),
            seed=seed,
            threads=threads,
            step_limit=step_limit,
            profile=ctypes.pointer(profile),
        )
        report = abi.Report(struct_size=ctypes.sizeof(abi.Report))
        failed = self._library.mslc_run(ctypes.byref(launch), ctypes.byref(report))
        findings = self._findings(report)
        result = Report(findings, **{name: getattr(report, name) for name in abi.COUNTERS})
        if self.options.profiled and not failed:
            result.profile = read_profile(profile, self.kernels[kernel], report, self._place_of_code)
        self._library.mslc_report_clear(ctypes.byref(report))
        self._library.mslc_profile_clear(ctypes.byref(profile))
        if failed or (findings and self.options.checked):
            raise SimulationError(findings)
        return result

    def _check_constants(self, kernel: Kernel) -> None:
        if kernel.missing_constants:
            index = {constant.name: constant.index for constant in self.compiled.module.constants}
            missing = ", ".join(f"{index[name]} ('{name}')" for name in kernel.missing_constants)
            raise ValueError(f"kernel '{kernel.name}' needs a value for function constant {missing}")

    def _bind(self, kernel: Kernel, buffers: Mapping[int | str, object]) -> dict[int, np.ndarray]:
        indices = {p.name: p.index for p in kernel.parameters if p.kind == BUFFER}
        arrays: dict[int, np.ndarray] = {}
        for key, value in buffers.items():
            if isinstance(key, str):
                if key not in indices:
                    raise ValueError(f"kernel '{kernel.name}' has no buffer named '{key}'")
                key = indices[key]
            if not 0 <= key < abi.MAX_BUFFERS:
                raise ValueError(f"buffer index {key} is out of range")
            arrays[key] = as_array(value)
        missing = [
            f"{p.index} ('{p.name}')"
            for p in kernel.parameters
            if p.kind == BUFFER and p.index not in arrays and not p.function_constant
        ]
        if missing:
            raise ValueError(f"kernel '{kernel.name}' needs buffer {', '.join(missing)}")
        return arrays

    def _check_threadgroup_memory(self, kernel: Kernel, lengths: list[int]) -> None:
        for parameter in kernel.parameters:
            if parameter.kind == THREADGROUP and (parameter.index >= len(lengths) or not lengths[parameter.index]):
                raise ValueError(
                    f"kernel '{kernel.name}' needs a length for threadgroup memory {parameter.index} ('{parameter.name}')"
                )

    def findings_at(self, address: int) -> list[Finding]:
        """Returns the findings of a launch made without `run`.

        Args:
          address: the address of its `mslc_report`.

        Returns:
          The findings, in order.
        """
        return self._findings(abi.Report.from_address(address))

    def profile_at(self, kernel: str, report: int, profile: int) -> LaunchProfile:
        """Returns the profile of a launch made without `run`, by a library compiled with `options=PROFILED`.

        Args:
          kernel: the kernel's host name.
          report: the address of the launch's `mslc_report`.
          profile: the address of its `mslc_profile`.

        Returns:
          The profile.
        """
        raw, counts = abi.Profile.from_address(profile), abi.Report.from_address(report)
        return read_profile(raw, self.kernels[kernel], counts, self._place_of_code)

    def _findings(self, report: abi.Report) -> list[Finding]:
        return _merge(self._finding(report.findings[i]) for i in range(report.finding_count))

    def _finding(self, raw: abi.Finding) -> Finding:
        place = self._place(raw.file.decode(), raw.line, raw.column) if raw.file else self._place_of_code(raw.pc)
        kernel = raw.kernel.decode()
        if raw.pc and not place[0]:  # before the kernel's first statement, for example a stack overflow
            place = self.kernels[kernel].file, self.kernels[kernel].file_line, 1
        other = self._place_of_code(raw.other_pc)
        position = raw.threadgroup_position
        return Finding(
            abi.FINDING_KINDS[raw.kind],
            author_words(raw.message.decode(errors="replace")),
            kernel,
            *place,
            (position.x, position.y, position.z),
            raw.thread_index,
            raw.other_thread,
            *other,
            raw.buffer,
            raw.offset,
            raw.size,
            raw.count,
        )

    def _place(self, file: str, line: int, column: int) -> tuple[str, int, int]:
        """Returns the author's position for one that the compiler reports."""
        return file, *self.compiled.source_map.original(file, line, column)

    def _place_of_code(self, pc: int | None) -> tuple[str, int, int]:
        """Returns the author's position for a return address in the library, or ("", 0, 0) if it is unknown."""
        if not pc:
            return "", 0, 0
        found = self._line_table.find(pc - self._load_address)
        return self._place(*found) if found else ("", 0, 0)

    @cached_property
    def _line_table(self) -> LineTable:
        return LineTable(self.compiled.path)

    @cached_property
    def _load_address(self) -> int:
        loaded = ctypes.cast(self._library.mslc_kernels, ctypes.c_void_p).value
        assert loaded is not None  # for the type checker: c_void_p.value may be None
        return loaded - self._line_table.symbols["mslc_kernels"]


def _merge(findings: Iterable[Finding]) -> list[Finding]:
    """Merges findings with the same position, because the compiler may have copied a line."""
    merged: dict[tuple, Finding] = {}
    for finding in findings:
        key = finding.kind, finding.file, finding.line, finding.column, "" if finding.file else finding.message
        if key in merged:
            merged[key].count += finding.count
        else:
            merged[key] = finding
    return list(merged.values())


def _flags(dispatch: str, options: Options) -> int:
    flags = abi.DISPATCH_THREADS if dispatch == "threads" else 0
    return flags | (abi.CHECKED if options.checked else 0) | (abi.PROFILED if options.profiled else 0)


def as_array(value: object) -> np.ndarray:
    """Returns the array to bind for a value. Arrays stay as they are, so kernels can write them; numbers become
    constants."""
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError("buffers must be C-contiguous arrays")
        return value
    if isinstance(value, (bytes, bytearray)):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, bool):
        return np.array(value)
    if isinstance(value, int):
        return np.array(value, np.int32)
    if isinstance(value, float):
        return np.array(value, np.float32)
    if isinstance(value, np.generic):
        return np.array(value)
    raise TypeError(f"a buffer must be an array, a number or bytes, not {type(value).__name__}")


def _offset(array: np.ndarray) -> int:
    """Returns the offset in bytes from the array that owns the memory."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return array.ctypes.data - owner.ctypes.data


def _size(extent: Sequence[int]) -> abi.Size:
    values = (*extent, 1, 1)[:3]
    if any(v < 0 for v in values):
        raise ValueError(f"a grid or threadgroup size must not be negative: {tuple(extent)}")
    return abi.Size(*values)


def _lengths(memory: Mapping[int, int] | Sequence[int]) -> list[int]:
    if isinstance(memory, Mapping):
        return [memory.get(i, 0) for i in range(max(memory, default=-1) + 1)]
    return list(memory)

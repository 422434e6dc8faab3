"""Compiles Metal source to a shared library for the simulator's runtime. Results are cached by content."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from . import diagnostics
from .diagnostics import CompileError, Diagnostic, SourceMap
from .entry import Module
from .lexer import PositionMap, SourceError
from .precompiled import include_shim
from .preprocess import PreprocessorError, Source, included_files, preprocess
from .rewrite import CPU, Rewritten, Target, rewrite
from .toolchain import (
    ToolchainError,
    build_runtime,
    cache_directory,
    digest,
    fingerprint,
    keep,
    link_shared,
    run_tool,
)
from .undefined import undefined_in_object, undefined_uses

Constants = Mapping[int | str, object]
# Errors raised when a cache file is missing, truncated or has other contents.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)

# The disabled warnings complain about Metal idioms or about code that the rewriter generates.
LANGUAGE_FLAGS = [
    "-x",
    "c++",
    "-std=c++20",
    "-nostdinc",
    "-fno-exceptions",
    "-fno-rtti",
    "-fdeclspec",  # the members for swizzles are properties; see shim/swizzle.h
    "-fno-math-errno",
    "-fsigned-char",
    "-fno-strict-float-cast-overflow",  # converting NaN to an integer gives 0, and large values saturate
    "-ffp-contract=fast-honor-pragmas",  # plain "fast" also fuses what a pragma excludes
    "-ferror-limit=20",
    "-Wall",
    "-Werror=global-constructors",  # rejects code that would run at load time, outside of a launch
    "-Wno-unused",
    "-Wno-duplicate-decl-specifier",
    "-Wno-unknown-attributes",
    "-Wno-c++11-narrowing",
    "-Wno-user-defined-literals",
    "-Wno-reserved-user-defined-literal",
    "-Wno-unknown-pragmas",
    "-Wno-pass-failed",
    "-Wno-missing-braces",
    "-Wno-parentheses",
    "-Wno-ignored-attributes",
    "-Wno-deprecated",
]
# MSL rounds half and bfloat after every operation; clang would keep intermediate results in float.
PRECISION_FLAGS = ["-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"]
# These flags enable Metal's address-space rules except those that make structs impossible to copy; see
# shim/address_space.h.
RELAXED_SPACES = ["-Xclang", "-fsycl-is-device", "-Xclang", "-aux-triple", "-Xclang", "x86_64-unknown-linux-gnu"]
STRICT_SPACES = ["-DMSLC_STRICT"]
# Use the machine's own instructions except AVX512-FP16, which would fuse a half product and sum into one operation with
# a single rounding. The baseline instructions of arm64 do not do that.
MACHINE_FLAGS = ["-march=native", "-mno-avx512fp16"] if platform.machine() == "x86_64" else []
# These flags turn undefined behaviour (null accesses, endless loops and recursion, unreachable code, frames that jump
# over a stack's guard pages) into an instruction that traps, which the runtime reports as a finding.
SURVIVABLE_FLAGS = [
    "-fno-delete-null-pointer-checks",
    "-fno-finite-loops",
    "-fstack-clash-protection",
    "-mllvm",
    "-trap-unreachable",
]
# The runtime identifies a collective by its return address. A tail call would remove that address, and merging two
# calls or copying one into branches would change which calls share it.
CPU_FLAGS = [
    "-O2",
    *MACHINE_FLAGS,
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-optimize-sibling-calls",
    "-fconvergent-functions",
    "-fmax-type-align=8",  # emits unaligned vector loads and stores, so that a misaligned access cannot end the process
    "-gdwarf-4",
    "-gline-tables-only",  # must follow -gdwarf-4, which alone would emit variables too
    "-fdebug-compilation-dir=.",
    "-mllvm",  # without variables there is nothing to locate, and the search takes a tenth of the compile time
    "-experimental-debug-variable-locations=false",
    *SURVIVABLE_FLAGS,
]


# Every memory access becomes a runtime call (runtime/access.h). The disabled passes would hide accesses: TSan ignores
# 32-byte vectors, memcpy loops escape the bounds checks, code merged from two branches loses its line, and a vector
# used by element would be loaded element by element.
INSTRUMENTATION = (
    "-O1",
    "-fsanitize=thread,array-bounds,local-bounds",
    "-fno-sanitize-recover=all",
    "-fno-sanitize-trap=all",
    "-fno-max-type-align",  # the callbacks must see the alignment that types require
    "-fno-vectorize",
    "-fno-slp-vectorize",
    *(
        argument
        for option in (
            "-tsan-instrument-func-entry-exit=0",
            "-tsan-instrument-read-before-write",
            "-disable-loop-idiom-all",
            "-disable-vector-combine",
            "-disable-lsr",  # LSR takes a quarter of the compile time, and calls dominate the loops anyway
        )
        for argument in ("-mllvm", option)
    ),
)


# These checks report through calls before each use of a pointer. Only checked builds have them, because optimising
# around the calls adds accesses. At a null pointer, the runtime reports the access rather than its misalignment.
POINTER_CHECKS = ("-fsanitize=null,alignment", "-fsanitize-recover=null,alignment")
# A kernel continues after a division by zero, as on a GPU, with an unspecified result.
DIVISION_CHECKS = ("-fsanitize=integer-divide-by-zero", "-fsanitize-recover=integer-divide-by-zero")


@dataclass(frozen=True)
class Options:
    """Build options of a library. `flags` are added to the compiler's flags.

    `checked` detects races and other errors; `profiled` counts accesses; both need INSTRUMENTATION. `kernels` restricts
    the build to the named kernels, because compile time grows with the amount of code.
    """

    checked: bool = False
    profiled: bool = False
    flags: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


# Kernels unroll their loops to keep arrays in a GPU's registers. Checked kernels run as fast without, and compile in a
# third to an eighth of the time.
KEPT_LOOPS = ("-mllvm", "-unroll-threshold=0", "-mllvm", "-pragma-unroll-threshold=0")

UNCHECKED: Options = Options()
"""Without instrumentation: the fastest."""
CHECKED: Options = Options(checked=True, flags=(*INSTRUMENTATION, *POINTER_CHECKS, *DIVISION_CHECKS, *KEPT_LOOPS))
"""Detects races, wrong accesses and the other errors that ``verify`` looks for."""
PROFILED: Options = Options(profiled=True, flags=(*INSTRUMENTATION, "-DMSLC_PROFILED_BUILD"))
"""Counts memory accesses, for ``Report.profile``."""


@dataclass
class Compiled:
    """A compiled library on disk, with its description."""

    path: Path
    module: Module
    source: Source
    _positions: dict = field(repr=False)

    @cached_property
    def source_map(self) -> SourceMap:
        preprocessed = self.path.with_suffix(".ii").read_text(encoding="utf-8")
        lines = {int(line): [tuple(s) for s in segments] for line, segments in self._positions.items()}
        return SourceMap(preprocessed, PositionMap(lines), {self.source.name: self.source.text})


def compile_library(source: Source, constants: Constants | None = None, options: Options = UNCHECKED) -> Compiled:
    """Compiles a source, or loads it from the cache. Raises CompileError with positions in the author's files."""
    constants = dict(constants or {})
    settings = sorted((str(k), repr(v)) for k, v in constants.items()), options
    request = digest(fingerprint(), source, *settings)
    directory = cache_directory()
    manifest = directory / f"{request}.manifest"
    cached = _load(directory, manifest, source)
    if cached is not None:
        return cached

    preprocessed = run_preprocessor(source)
    key = digest(fingerprint(), preprocessed, *settings)
    path = directory / f"{key}.so"
    if _description(path) is None:
        rewritten = run_rewriter(source, preprocessed, constants, only=options.kernels)
        library = _compile(source, preprocessed, rewritten, options)
        text = preprocessed.encode()
        description = {
            "module": rewritten.module.to_json(),
            "positions": rewritten.positions.lines,
            "digests": {".ii": digest(text), ".so": digest(library)},
        }
        # Write the description last: its presence means that the other files are complete.
        keep(path.with_suffix(".ii"), text)
        keep(path, library)
        keep(path.with_suffix(".json"), json.dumps(description).encode())
    dependencies = {name: _file_digest(name) for name in included_files(preprocessed, source)}
    keep(manifest, json.dumps({"key": key, "dependencies": dependencies}).encode())
    compiled = _load(directory, manifest, source)
    if compiled is None:
        raise ToolchainError(f"the cache directory {directory} changed during the compilation")
    return compiled


def run_preprocessor(source: Source) -> str:
    try:
        return preprocess(source)
    except PreprocessorError as error:
        source_map = SourceMap("", PositionMap(), {source.name: source.text})
        found = diagnostics.parse(error.stderr, source_map)
        if not found:
            raise ToolchainError(f"the preprocessor failed:\n{error.stderr}") from None
        raise CompileError(diagnostics.errors(found)) from None


def run_rewriter(
    source: Source,
    preprocessed: str,
    constants: Constants | None = None,
    target: Target = CPU,
    only: Collection[str] = (),
) -> Rewritten:
    try:
        rewritten = rewrite(preprocessed, constants, target, only)
    except SourceError as error:
        source_map = SourceMap(preprocessed, PositionMap(), {source.name: source.text})
        file, line, column = source_map.of_preprocessed(*error.position)
        text = source_map.source_line(file, line)
        raise CompileError([Diagnostic(file, line, column, "error", error.message, text)]) from None
    source_map = SourceMap(preprocessed, PositionMap())
    for kernel in rewritten.module.kernels:
        kernel.file, kernel.file_line = source_map.line_of_preprocessed(kernel.line)
    return rewritten


# Seconds, several times what our largest kernels take on a busy machine.
LONGEST_COMPILATION = 120.0


class BackendError(ToolchainError):
    """The compiler accepts the source and fails to generate code for it."""


def run_compiler(
    source: Source, preprocessed: str, rewritten: Rewritten, flags: Sequence[str], seconds: float | None = None
) -> list[Diagnostic]:
    """Runs clang on the rewritten text. Returns its warnings; raises CompileError for errors, and BackendError if it
    takes longer than ``seconds``."""
    shim = include_shim(LANGUAGE_FLAGS, [*flags])
    try:
        result = run_tool(["clang", *LANGUAGE_FLAGS, *shim, *flags, "-"], rewritten.text, seconds)
    except subprocess.TimeoutExpired:
        raise BackendError(f"the compiler did not end within {seconds:.0f} s") from None
    source_map = SourceMap(preprocessed, rewritten.positions, {source.name: source.text})
    found = diagnostics.parse(result.stderr, source_map)
    if result.returncode:
        failures = diagnostics.errors(found)
        if not failures:
            error = BackendError if "error in backend" in result.stderr else ToolchainError
            raise error(f"the compiler failed:\n{result.stderr.strip()}")
        raise CompileError(failures)
    return found


def _compile(source: Source, preprocessed: str, rewritten: Rewritten, options: Options) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        output = os.path.join(directory, "kernels.o")
        flags = [*PRECISION_FLAGS, *RELAXED_SPACES, *CPU_FLAGS, *options.flags, "-c", "-o", output]
        try:
            run_compiler(source, preprocessed, rewritten, flags, LONGEST_COMPILATION)
        except BackendError:
            # clang 22 cannot widen some vectors of bool that its optimiser makes at -O2 (MLX's attention_nax). For
            # AVX-512 it says so; for AVX2 it tries without end.
            flags.append("-O1")
            run_compiler(source, preprocessed, rewritten, flags)
        if foreign := undefined_in_object(Path(output)):
            raise CompileError(_foreign_uses(source, preprocessed, rewritten, flags, foreign))
        library = Path(directory, "kernels.so")
        link_shared([output, str(build_runtime())], library)
        return library.read_bytes()


def _foreign_uses(
    source: Source, preprocessed: str, rewritten: Rewritten, flags: Sequence[str], symbols: Collection[str]
) -> list[Diagnostic]:
    with tempfile.TemporaryDirectory() as directory:
        code = Path(directory, "kernels.ll")
        run_compiler(source, preprocessed, rewritten, [*flags, "-S", "-emit-llvm", "-o", str(code)])
        source_map = SourceMap(preprocessed, rewritten.positions, {source.name: source.text})
        found = list(undefined_uses(code.read_text(encoding="utf-8"), symbols, source_map))
    if not found:
        raise ToolchainError(
            f"the compiler needs symbols that the simulator does not provide: {', '.join(sorted(symbols))}"
        )
    return found


def _load(directory: Path, manifest: Path, source: Source) -> Compiled | None:
    """Loads the cached library of a request. Returns None if it is missing or damaged, or an included file has
    changed."""
    try:
        recorded = json.loads(manifest.read_bytes())
        path = directory / f"{recorded['key']}.so"
        for name, recorded_digest in recorded["dependencies"].items():
            if _file_digest(name) != recorded_digest:
                return None
    except _DAMAGED:
        return None
    description = _description(path)
    if description is None:
        return None
    build_runtime()  # the library needs the runtime, which may be missing or damaged too
    with contextlib.suppress(OSError):
        os.utime(manifest)  # records the last use for whatever cleans the cache
    return Compiled(path, Module.from_json(description["module"]), source, description["positions"])


def _description(path: Path) -> dict | None:
    """Returns the description of a cached library if all its files match their recorded digests."""
    try:
        description = json.loads(path.with_suffix(".json").read_bytes())
        for suffix, recorded in description["digests"].items():
            if digest(path.with_suffix(suffix).read_bytes()) != recorded:
                return None
    except _DAMAGED:
        return None
    return description


def _file_digest(name: str) -> str:
    return digest(Path(name).read_bytes())

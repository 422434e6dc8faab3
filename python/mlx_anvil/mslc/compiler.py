"""Metal source to a shared library that the simulator's runtime can run; results are cached by content."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from . import diagnostics
from .diagnostics import CompileError, Diagnostic, SourceMap
from .entry import Module
from .lexer import PositionMap, SourceError
from .preprocess import PreprocessorError, Source, included_files, preprocess
from .rewrite import CPU, Rewritten, Target, rewrite
from .toolchain import (
    SHIM,
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
# What reading a file of the cache raises that is missing, was cut off or holds something else.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)

# The warnings that are off complain about Metal idioms or about what the rewriter writes.
LANGUAGE_FLAGS = [
    "-x",
    "c++",
    "-std=c++20",
    "-nostdinc",
    "-fno-exceptions",
    "-fno-rtti",
    "-fdeclspec",  # swizzles of structs are properties; see shim/swizzle.h
    "-fno-math-errno",
    "-fsigned-char",
    "-fno-strict-float-cast-overflow",  # as integers, NaN is 0 and what is too large the limit
    "-ffp-contract=fast-honor-pragmas",  # plain "fast" fuses what a pragma excepts, too
    "-ferror-limit=20",
    "-Wall",
    "-Werror=global-constructors",  # code that would run when the library is loaded, outside of any launch
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
# MSL rounds half and bfloat after every operation; clang would keep expressions in float.
PRECISION_FLAGS = ["-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"]
# Metal's rules for address spaces, minus what makes copying a struct impossible; see shim/address_space.h.
RELAXED_SPACES = ["-Xclang", "-fsycl-is-device", "-Xclang", "-aux-triple", "-Xclang", "x86_64-unknown-linux-gnu"]
STRICT_SPACES = ["-DMSLC_STRICT"]
# The machine's own instructions, but not those for halves: with them a product and a sum would become one operation, rounded
# once. What arm64 always has does without them.
MACHINE_FLAGS = ["-march=native", "-mno-avx512fp16"] if platform.machine() == "x86_64" else []
# What is undefined in C++ stays an instruction that the processor refuses, of which the runtime makes a finding: accesses
# through null pointers, loops and recursion without end, code that cannot be reached, and frames that jump over the guard
# pages of a stack.
SURVIVABLE_FLAGS = [
    "-fno-delete-null-pointer-checks",
    "-fno-finite-loops",
    "-fstack-clash-protection",
    "-mllvm",
    "-trap-unreachable",
]
# The runtime recognises collectives by their return address, which a tail call would not leave, and which must not be
# shared by two calls in the source: no call may be merged with another, or copied into branches.
CPU_FLAGS = [
    "-O2",
    *MACHINE_FLAGS,
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-optimize-sibling-calls",
    "-fconvergent-functions",
    "-fmax-type-align=8",  # instructions for vectors that may lie anywhere: a misaligned one must not end the process
    "-gdwarf-4",
    "-gline-tables-only",  # after the version, which alone would ask for variables as well
    "-fdebug-compilation-dir=.",
    *SURVIVABLE_FLAGS,
]


# Every access to memory becomes a call of the runtime (runtime/access.h). The passes that are turned off would hide
# accesses: the instrumentation knows no vectors of 32 bytes, loops turned into memcpy escape the bounds checks, and code
# that two branches share has no line of its own. A vector whose elements are used one by one would be loaded so.
INSTRUMENTATION = (
    "-O1",
    "-fsanitize=thread,array-bounds,local-bounds",
    "-fno-sanitize-recover=all",
    "-fno-sanitize-trap=all",
    "-fno-max-type-align",  # the callbacks are to know what types require
    "-fno-vectorize",
    "-fno-slp-vectorize",
    *(
        argument
        for option in (
            "-tsan-instrument-func-entry-exit=0",
            "-tsan-instrument-read-before-write",
            "-disable-loop-idiom-all",
            "-disable-vector-combine",
            "-disable-lsr",  # a quarter of the compiler's time, for loops whose time is that of the calls in them
        )
        for argument in ("-mllvm", option)
    ),
)


# Calls before each use of a pointer, for checks only: code that is optimised around them makes accesses that it would not
# make otherwise. Of a pointer to nothing the runtime says so at the access, and not that it is misaligned.
POINTER_CHECKS = ("-fsanitize=null,alignment", "-fsanitize-recover=null,alignment")
# A kernel goes on after a division by zero, as on a GPU; what it gives is not specified.
DIVISION_CHECKS = ("-fsanitize=integer-divide-by-zero", "-fsanitize-recover=integer-divide-by-zero")


@dataclass(frozen=True)
class Options:
    """What is compiled into a library besides its source. `flags` are added to the compiler's.

    `checked` looks for races and other mistakes, `profiled` counts accesses; both need INSTRUMENTATION. `kernels` names those
    that are wanted, where not all are: compiling takes as long as there is code.
    """

    checked: bool = False
    profiled: bool = False
    flags: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


UNCHECKED = Options()
CHECKED = Options(checked=True, flags=(*INSTRUMENTATION, *POINTER_CHECKS, *DIVISION_CHECKS))
PROFILED = Options(profiled=True, flags=(*INSTRUMENTATION, "-DMSLC_PROFILED_BUILD"))


@dataclass
class Compiled:
    """A library on disk, and what is known about it."""

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
    """Compiles, or finds in the cache. Raises CompileError with places in the author's files."""
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
        # The description comes last: it tells whether the rest is whole.
        keep(path.with_suffix(".ii"), text)
        keep(path, library)
        keep(path.with_suffix(".json"), json.dumps(description).encode())
    dependencies = {name: _file_digest(name) for name in included_files(preprocessed, source)}
    keep(manifest, json.dumps({"key": key, "dependencies": dependencies}).encode())
    compiled = _load(directory, manifest, source)
    if compiled is None:
        raise ToolchainError(f"the cache directory {directory} changes while it is used")
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


def run_compiler(source: Source, preprocessed: str, rewritten: Rewritten, flags: Sequence[str]) -> list[Diagnostic]:
    """Runs clang on rewritten text. Returns its warnings, raises CompileError for errors."""
    arguments = ["clang", *LANGUAGE_FLAGS, "-include", str(SHIM / "mslc.h"), *flags, "-"]
    result = run_tool(arguments, text=rewritten.text)
    source_map = SourceMap(preprocessed, rewritten.positions, {source.name: source.text})
    found = diagnostics.parse(result.stderr, source_map)
    if result.returncode:
        failures = diagnostics.errors(found)
        if not failures:
            raise ToolchainError(f"the compiler failed:\n{result.stderr.strip()}")
        raise CompileError(failures)
    return found


def _compile(source: Source, preprocessed: str, rewritten: Rewritten, options: Options) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        output = os.path.join(directory, "kernels.o")
        flags = [*PRECISION_FLAGS, *RELAXED_SPACES, *CPU_FLAGS, *options.flags, "-c", "-o", output]
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
        raise ToolchainError(f"the compiler wants what the simulator does not have: {', '.join(sorted(symbols))}")
    return found


def _load(directory: Path, manifest: Path, source: Source) -> Compiled | None:
    """The cached library of a request, unless it is missing or damaged, or a file that it includes has changed."""
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
    build_runtime()  # which the library needs; it may be missing or damaged, too
    with contextlib.suppress(OSError):
        os.utime(manifest)  # when it was last used, for whoever cleans the cache
    return Compiled(path, Module.from_json(description["module"]), source, description["positions"])


def _description(path: Path) -> dict | None:
    """What is recorded of a cached library, if all of its files are as they were written."""
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

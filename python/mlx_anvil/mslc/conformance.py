"""Finds code that upstream clang accepts but Apple's compiler rejects or may reject.

Besides the strict lint, it checks for C++ that Metal leaves out, C++ features that MLX's own kernels avoid, the rules
for declarations (declaration_rules.py, kernel_rules.py) and casts (cast_rules.py), recursion, the limits and bindings
of kernels, and spellings that are not known to compile (attestation.py). It covers every version of the language.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import cast_rules, declaration_rules, kernel_rules, language_rules
from .attestation import unattested
from .compiler import run_preprocessor, run_rewriter
from .diagnostics import CompileError, Diagnostic, SourceMap
from .entry import BUFFER, THREADGROUP, Kernel, Module
from .intermediate import IntermediateCode
from .lexer import PositionMap, TokenStream
from .lint import lint, space_of_object
from .passes.constants import OPAQUE
from .preprocess import UNDEFINED, Source
from .rewrite import CONFORMANCE, Rewritten
from .static_memory import most_static_threadgroup_memory, static_threadgroup_memory
from .structure import Structure
from .toolchain import SHIM
from .undefined import undefined_in_code, undefined_uses

STANDARDS: dict[str, int] = {"metal3.1": 310, "metal3.2": 320, "metal4.0": 400, "metal4.1": 410}
"""The language versions that MLX may compile with, and the ``__METAL_VERSION__`` of each."""

CPP17_SINCE = 400
GENERIC_THIS_SINCE = (
    410  # since 4.1 an implicit `this` is __metal_generic, which accepts objects in all writable memory
)

LAST_BUFFER = 30
MOST_THREADGROUP_MEMORY = 32 * 1024

_NEWER_LANGUAGE = ("-Wpre-c++17-compat", "-Wpre-c++20-compat")
# C++17 features that Apple's compiler accepts in Metal 3.1: MLX's kernels use them.
_TAKEN = ("constexpr if", "'static_assert' with no message", "inline variables")


@dataclass(frozen=True)
class _Finding:
    """A diagnostic without the parts that depend on the language version."""

    file: str
    line: int
    column: int
    severity: str
    message: str


def conformance(
    source: Source, standards: Sequence[str] = tuple(STANDARDS), attested: Sequence[str | Path] = ()
) -> list[Diagnostic]:
    """Returns every doubtful place in one file, with positions in the author's files.

    `standards` are keys of STANDARDS. A finding that does not apply to all of them names those it applies to.
    `attested` are folders of Metal source that is known to compile, in addition to the headers of the mlx package.
    """
    found: dict[_Finding, tuple[Diagnostic, list[str]]] = {}
    checked: dict[str, _Checked] = {}  # keyed by preprocessed text, because few sources depend on the version
    for standard in standards:
        for d in _in_version(source, STANDARDS[standard], attested, checked):
            key = _Finding(d.file, d.line, d.column, d.severity, d.message)
            found.setdefault(key, (d, []))[1].append(standard)
    return [
        d if len(seen) == len(standards) else replace(d, message=f"{d.message} ({', '.join(seen)})")
        for d, seen in found.values()
    ]


@dataclass
class _Checked:
    """One preprocessed text, and what is found in it in every version."""

    stream: TokenStream
    source_map: SourceMap
    of_text: list[Diagnostic]
    of_code: list[Diagnostic]


def _in_version(
    source: Source, version: int, attested: Sequence[str | Path], checked: dict[str, _Checked]
) -> list[Diagnostic]:
    # Define the macros as Apple's compiler does.
    defines = {**dict(source.defines), "__MSLC__": UNDEFINED, "__METAL_VERSION__": str(version)}
    source = replace(source, defines=tuple(defines.items()))
    try:
        preprocessed = run_preprocessor(source)
        if preprocessed not in checked:
            checked[preprocessed] = _check(source, preprocessed, attested)
    except CompileError as error:
        return error.diagnostics
    known = checked[preprocessed]
    language = _placed(language_rules.violations(known.stream, version), known.source_map)
    return [*language, *known.of_text, *(d for d in known.of_code if not _allowed_in(d, version))]


def _check(source: Source, preprocessed: str, attested: Sequence[str | Path]) -> _Checked:
    of_code = _of_code(source, preprocessed)
    stream = TokenStream(preprocessed)
    structure = Structure(stream)
    source_map = SourceMap(preprocessed, PositionMap(), {source.name: source.text})
    rules = (declaration_rules, kernel_rules, cast_rules)
    of_text = [d for rule in rules for d in _placed(rule.violations(stream, structure), source_map)]
    return _Checked(stream, source_map, [*of_text, *unattested(source, preprocessed, attested)], of_code)


def _placed(violations: Iterable[tuple[tuple[int, int], str]], source_map: SourceMap) -> Iterator[Diagnostic]:
    for position, message in violations:
        file, line, column = source_map.of_preprocessed(*position)
        yield Diagnostic(file, line, column, "error", message, source_map.source_line(file, line))


def _allowed_in(diagnostic: Diagnostic, version: int) -> bool:
    """Tells if a later language version allows the code that a diagnostic complains about."""
    if "incompatible with C++ standards before C++17" in diagnostic.message:
        return version >= CPP17_SINCE
    return version >= GENERIC_THIS_SINCE and space_of_object(diagnostic) in ("device", "threadgroup")


def _of_code(source: Source, preprocessed: str) -> list[Diagnostic]:
    """Checks that compile the code."""
    rewritten = run_rewriter(source, preprocessed)
    module = rewritten.module
    opaque: dict[int | str, object] = {constant.index: OPAQUE for constant in module.constants}
    found = [*lint(source, opaque, CONFORMANCE), *_bindings(module)]
    if any(d.severity == "error" for d in found):
        return found  # the remaining checks compile the file again
    code = IntermediateCode.of(source, optimised=False, warnings=_NEWER_LANGUAGE)
    return [
        *found,
        *_newer_language(code),
        *_undefined(source, preprocessed, rewritten, code),
        *_limits(source, module, code),
        *_recursion(module, code),
    ]


def repeated_names(kernels: Iterable[str]) -> list[str]:
    """Returns host names shared by several kernels. They must be unique: a metallib holds the kernels of all files."""
    return sorted(name for name, count in Counter(kernels).items() if count > 1)


def _newer_language(code: IntermediateCode) -> list[Diagnostic]:
    """Returns clang's diagnostics about features newer than C++14 in the author's text."""
    newer = [d for d in code.diagnostics if "incompatible with C++ standards before" in d.message]
    return [d for d in newer if not d.message.startswith(_TAKEN) and not d.file.startswith(str(SHIM))]


def _bindings(module: Module) -> Iterator[Diagnostic]:
    for kernel in module.kernels:
        for kind in (BUFFER, THREADGROUP):
            indices = Counter(p.index for p in kernel.parameters if p.kind == kind)
            for index, count in indices.items():
                if count > 1:
                    yield _of_kernel(kernel, f"binds {kind}({index}) twice")
                if index > LAST_BUFFER:
                    yield _of_kernel(kernel, f"binds {kind}({index}); the last index is {LAST_BUFFER}")


def _limits(source: Source, module: Module, code: IntermediateCode) -> Iterator[Diagnostic]:
    # Only the optimiser knows which branches are dead, but it takes ten times as long as all other checks. Run it only
    # for kernels in doubt.
    in_doubt = {k for k, size in most_static_threadgroup_memory(code).items() if size > MOST_THREADGROUP_MEMORY}
    memory = static_threadgroup_memory(source, kernels=in_doubt) if in_doubt else {}
    for kernel in module.kernels:
        if memory.get(kernel.name, 0) > MOST_THREADGROUP_MEMORY:
            message = f"uses {memory[kernel.name]} bytes of threadgroup memory; the limit is {MOST_THREADGROUP_MEMORY}"
            yield _of_kernel(kernel, message)


def _undefined(source: Source, preprocessed: str, rewritten: Rewritten, code: IntermediateCode) -> Iterator[Diagnostic]:
    source_map = SourceMap(preprocessed, rewritten.positions, {source.name: source.text})
    return undefined_uses(code.text, undefined_in_code(code.text), source_map)


def _recursion(module: Module, code: IntermediateCode) -> Iterator[Diagnostic]:
    """Finds recursion below kernels in unoptimised code, because the optimiser turns recursion into loops."""
    recursive = {f for f in code.functions if any(f in code.reached_from(called) for called in code.calls[f])}
    for kernel in module.kernels:
        for function in sorted(recursive & code.reached_from(code.entries[kernel.name])):
            yield _of_kernel(kernel, f"calls a recursive function: {function}")


def _of_kernel(kernel: Kernel, message: str) -> Diagnostic:
    return Diagnostic(kernel.file, kernel.file_line, 1, "error", f"kernel '{kernel.name}' {message}")

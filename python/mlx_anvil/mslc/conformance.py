"""What Apple's compiler would refuse, or might, though upstream clang takes it.

Beside the strict lint: C++ that Metal 3.1 leaves out, features of C++ after C++14 that MLX's own kernels do without,
variables without an address space, recursion, and the limits of kernels and their bindings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from .compiler import PRECISION_FLAGS, RELAXED_SPACES, run_compiler, run_preprocessor, run_rewriter
from .diagnostics import Diagnostic, SourceMap
from .entry import BUFFER, Kernel, Module
from .intermediate import IntermediateCode
from .language_rules import violations
from .lexer import PositionMap, TokenStream
from .lint import lint
from .preprocess import UNDEFINED, Source
from .rewrite import Rewritten
from .static_memory import most_static_threadgroup_memory, static_threadgroup_memory
from .toolchain import SHIM

LAST_BUFFER = 30
MOST_THREADGROUP_MEMORY = 32 * 1024

# Of C++17; Apple's compiler takes them in Metal 3.1, since MLX's kernels have them.
_TAKEN = ("constexpr if", "'static_assert' with no message", "inline variables")


def conformance(source: Source) -> list[Diagnostic]:
    """Everything that is doubtful in one file, in the author's places; empty for Metal that should compile anywhere."""
    source = replace(source, defines=(*source.defines, ("__MSLC__", UNDEFINED)))  # what Apple's compiler sees
    found = lint(source)
    if any(d.severity == "error" for d in found):
        return found  # the rest compiles the file again
    preprocessed = run_preprocessor(source)
    rewritten = run_rewriter(source, preprocessed)
    module, code = rewritten.module, IntermediateCode.of(source, optimised=False)
    return [
        *found,
        *_words(source, preprocessed),
        *_newer_language(source, preprocessed, rewritten),
        *_bindings(module),
        *_limits(source, module, code),
        *_recursion(module, code),
    ]


def repeated_names(kernels: Iterable[str]) -> list[str]:
    """Host names that more than one kernel has: a metallib holds those of all files."""
    return sorted(name for name, count in Counter(kernels).items() if count > 1)


def _words(source: Source, preprocessed: str) -> Iterator[Diagnostic]:
    source_map = SourceMap(preprocessed, PositionMap(), {source.name: source.text})
    for position, message in violations(TokenStream(preprocessed)):
        file, line, column = source_map.of_preprocessed(*position)
        yield Diagnostic(file, line, column, "error", message, source_map.source_line(file, line))


def _newer_language(source: Source, preprocessed: str, rewritten: Rewritten) -> list[Diagnostic]:
    """What clang says is not in C++14, in the author's text."""
    flags = [*PRECISION_FLAGS, *RELAXED_SPACES, "-fsyntax-only", "-Wpre-c++17-compat", "-Wpre-c++20-compat"]
    found = run_compiler(source, preprocessed, rewritten, flags)
    newer = [d for d in found if "incompatible with C++ standards before" in d.message]
    return [d for d in newer if not d.message.startswith(_TAKEN) and not d.file.startswith(str(SHIM))]


def _bindings(module: Module) -> Iterator[Diagnostic]:
    for constant in module.constants:
        if constant.type != "bool":
            yield Diagnostic("", 0, 0, "error", f"function constant '{constant.name}' is {constant.type}, not bool")
    for index in (i for i, count in Counter(c.index for c in module.constants).items() if count > 1):
        yield Diagnostic("", 0, 0, "error", f"function constant {index} is declared twice")
    for kernel in module.kernels:
        indices = Counter(p.index for p in kernel.parameters if p.kind == BUFFER)
        for index, count in indices.items():
            if count > 1:
                yield _of_kernel(kernel, f"has buffer({index}) twice")
            if index > LAST_BUFFER:
                yield _of_kernel(kernel, f"has buffer({index}); the last is {LAST_BUFFER}")


def _limits(source: Source, module: Module, code: IntermediateCode) -> Iterator[Diagnostic]:
    # The optimiser, which knows the branches that are never taken, needs ten times as long as everything else here.
    in_doubt = {k for k, size in most_static_threadgroup_memory(code).items() if size > MOST_THREADGROUP_MEMORY}
    memory = static_threadgroup_memory(source, kernels=in_doubt) if in_doubt else {}
    for kernel in module.kernels:
        if memory.get(kernel.name, 0) > MOST_THREADGROUP_MEMORY:
            message = f"uses {memory[kernel.name]} bytes of threadgroup memory; there are {MOST_THREADGROUP_MEMORY}"
            yield _of_kernel(kernel, message)


def _recursion(module: Module, code: IntermediateCode) -> Iterator[Diagnostic]:
    """Recursion in what kernels call, read off code that the optimiser has not turned into loops."""
    recursive = {f for f in code.functions if any(f in code.reached_from(called) for called in code.calls[f])}
    for kernel in module.kernels:
        for function in sorted(recursive & code.reached_from(code.entries[kernel.name])):
            yield _of_kernel(kernel, f"calls a recursive function: {function}")


def _of_kernel(kernel: Kernel, message: str) -> Diagnostic:
    return Diagnostic(kernel.file, kernel.file_line, 1, "error", f"kernel '{kernel.name}' {message}")

"""How much static threadgroup memory each kernel of a file may use, read off the compiler's intermediate code.

Sizes that depend on template arguments are known nowhere else. A launch may use less, where a branch is not taken.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from .compiler import (
    CPU_FLAGS,
    PRECISION_FLAGS,
    RELAXED_SPACES,
    Constants,
    run_compiler,
    run_preprocessor,
    run_rewriter,
)
from .entry import entry_symbol
from .preprocess import Source

_ALIGNMENT = 16  # of every variable in the arena
_FUNCTION = re.compile(r"^define [^@]*@([\w.$]+|\"[^\"]*\")\(.*?^\}", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(
    r"call [^@]*@mslc_threadgroup_variable\(ptr [^@]*@([\w.$]+|\"[^\"]*\"), i64 (?:noundef )?(\d+), "
)
_SYMBOL = re.compile(r"@([\w.$]+|\"[^\"]*\")")


def static_threadgroup_memory(source: Source, constants: Constants | None = None) -> dict[str, int]:
    """Kernel name to bytes."""
    preprocessed = run_preprocessor(source)
    rewritten = run_rewriter(source, preprocessed, constants)
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "kernels.ll"
        flags = [*PRECISION_FLAGS, *RELAXED_SPACES, *CPU_FLAGS, "-S", "-emit-llvm", "-o", str(output)]
        run_compiler(source, preprocessed, rewritten, flags)
        code = output.read_text()
    functions = {match.group(1): match.group() for match in _FUNCTION.finditer(code)}
    return {
        kernel.name: _reachable_memory(entry_symbol(number), functions)
        for number, kernel in enumerate(rewritten.module.kernels)
    }


def _reachable_memory(entry: str, functions: dict[str, str]) -> int:
    variables: dict[str, int] = {}
    seen, pending = {entry}, [entry]
    while pending:
        body = functions[pending.pop()]
        for name, size in _VARIABLE.findall(body):
            variables[name] = max(int(size), variables.get(name, 0))
        called = {symbol for symbol in _SYMBOL.findall(body) if symbol in functions} - seen
        seen |= called
        pending += called
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in variables.values())

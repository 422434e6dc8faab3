"""The LLVM IR of a file, function by function."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
from .diagnostics import Diagnostic
from .entry import Kernel, entry_symbol
from .preprocess import Source

_FUNCTION = re.compile(r"^define [^@]*@([\w.$]+|\"[^\"]*\")\(.*?^\}", re.MULTILINE | re.DOTALL)
_SYMBOL = re.compile(r"@([\w.$]+|\"[^\"]*\")")
# Only dead branches must go. The loop optimisations would take most of the compile time.
_FEWER_PASSES = ["-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fno-unroll-loops"]


@dataclass
class IntermediateCode:
    """`functions` maps function names to IR; `entries` maps kernel names to the functions that run them.

    `diagnostics` are the compiler's warnings.
    """

    functions: dict[str, str]
    entries: dict[str, str]
    text: str = field(default="", repr=False)
    diagnostics: list[Diagnostic] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        source: Source,
        constants: Constants | None = None,
        *,
        optimised: bool = True,
        kernels: Collection[str] = (),
        warnings: Sequence[str] = (),
    ) -> IntermediateCode:
        """Compiles the named kernels, or all of them. `warnings` are flags that enable more warnings."""
        preprocessed = run_preprocessor(source)
        rewritten = run_rewriter(source, preprocessed, constants, only=kernels)
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory) / "kernels.ll"
            flags = [
                *PRECISION_FLAGS,
                *RELAXED_SPACES,
                *CPU_FLAGS,
                *_FEWER_PASSES,
                *warnings,
                "-S",
                "-emit-llvm",
                "-o",
                str(output),
            ]
            if not optimised:
                flags += ["-Xclang", "-disable-llvm-passes"]
            diagnostics = run_compiler(source, preprocessed, rewritten, flags)
            code = output.read_text(encoding="utf-8")
        functions = {match.group(1): match.group() for match in _FUNCTION.finditer(code)}
        compiled: list[Kernel] = rewritten.module.kernels
        return cls(
            functions, {kernel.name: entry_symbol(number) for number, kernel in enumerate(compiled)}, code, diagnostics
        )

    @cached_property
    def calls(self) -> dict[str, set[str]]:
        """Maps each function to the functions of this file that it refers to."""
        bodies = {name: text.partition("\n")[2] for name, text in self.functions.items()}
        return {name: self.functions.keys() & set(_SYMBOL.findall(body)) for name, body in bodies.items()}

    def reached_from(self, entry: str) -> set[str]:
        """Returns a function and everything it may call, directly or indirectly."""
        seen, pending = {entry}, [entry]
        while pending:
            called = self.calls[pending.pop()] - seen
            seen |= called
            pending += called
        return seen

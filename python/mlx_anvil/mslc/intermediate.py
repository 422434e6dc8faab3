"""The compiler's intermediate code (LLVM IR) of a file, function by function."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection
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
from .entry import Kernel, entry_symbol
from .preprocess import Source

_FUNCTION = re.compile(r"^define [^@]*@([\w.$]+|\"[^\"]*\")\(.*?^\}", re.MULTILINE | re.DOTALL)
_SYMBOL = re.compile(r"@([\w.$]+|\"[^\"]*\")")
# Which branches are left is what is asked for; what would make loops fast takes most of the compiler's time.
_FEWER_PASSES = ["-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fno-unroll-loops"]


@dataclass
class IntermediateCode:
    """`functions` holds the text of each; `entries` the function that runs each kernel, by the kernel's name."""

    functions: dict[str, str]
    entries: dict[str, str]
    text: str = field(default="", repr=False)

    @classmethod
    def of(
        cls,
        source: Source,
        constants: Constants | None = None,
        *,
        optimised: bool = True,
        kernels: Collection[str] = (),
    ) -> IntermediateCode:
        """Of the kernels named, or of all."""
        preprocessed = run_preprocessor(source)
        rewritten = run_rewriter(source, preprocessed, constants, only=kernels)
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory) / "kernels.ll"
            flags = [
                *PRECISION_FLAGS,
                *RELAXED_SPACES,
                *CPU_FLAGS,
                *_FEWER_PASSES,
                "-S",
                "-emit-llvm",
                "-o",
                str(output),
            ]
            if not optimised:
                flags += ["-Xclang", "-disable-llvm-passes"]
            run_compiler(source, preprocessed, rewritten, flags)
            code = output.read_text(encoding="utf-8")
        functions = {match.group(1): match.group() for match in _FUNCTION.finditer(code)}
        compiled: list[Kernel] = rewritten.module.kernels
        return cls(functions, {kernel.name: entry_symbol(number) for number, kernel in enumerate(compiled)}, code)

    @cached_property
    def calls(self) -> dict[str, set[str]]:
        """The functions of this file that each function mentions."""
        bodies = {name: text.partition("\n")[2] for name, text in self.functions.items()}
        return {name: self.functions.keys() & set(_SYMBOL.findall(body)) for name, body in bodies.items()}

    def reached_from(self, entry: str) -> set[str]:
        """A function and all that it may call, however far down."""
        seen, pending = {entry}, [entry]
        while pending:
            called = self.calls[pending.pop()] - seen
            seen |= called
            pending += called
        return seen

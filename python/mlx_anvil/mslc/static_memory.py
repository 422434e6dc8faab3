"""How much static threadgroup memory each kernel of a file may use, read off the compiler's intermediate code.

Sizes that depend on template arguments are known nowhere else. A launch may use less, where a branch is not taken.
"""

from __future__ import annotations

import re

from .compiler import Constants
from .intermediate import IntermediateCode
from .preprocess import Source

_ALIGNMENT = 16  # of every variable in the arena
_VARIABLE = re.compile(
    r"call [^@]*@mslc_threadgroup_variable\(ptr [^@]*@([\w.$]+|\"[^\"]*\"), i64 (?:noundef )?(\d+), "
)


def static_threadgroup_memory(source: Source, constants: Constants | None = None) -> dict[str, int]:
    """Kernel name to bytes."""
    code = IntermediateCode.of(source, constants)
    return {kernel: _reachable_memory(code, entry) for kernel, entry in code.entries.items()}


def _reachable_memory(code: IntermediateCode, entry: str) -> int:
    variables: dict[str, int] = {}
    for function in code.reached_from(entry):
        for name, size in _VARIABLE.findall(code.functions[function]):
            variables[name] = max(int(size), variables.get(name, 0))
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in variables.values())

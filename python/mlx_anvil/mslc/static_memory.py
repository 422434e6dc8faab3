"""How much static threadgroup memory each kernel of a file may use, read off the compiler's intermediate code.

Sizes that depend on template arguments are known nowhere else. A launch may use less, where a branch is not taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .compiler import Constants
from .intermediate import IntermediateCode
from .preprocess import Source

_ALIGNMENT = 16  # of every variable in the arena
_NAME = r"(?P<name>[\w.$]+|\"[^\"]*\")"
_VARIABLE = re.compile(rf"call [^@]*@mslc_threadgroup_variable\(ptr [^@]*@{_NAME}, i64 (?:noundef )?(?P<size>\d+), ")
# Before functions are inlined: the call of the shim's function, whose result is a reference to the variable.
_REFERENCE = re.compile(
    r"call [^@\n]*\bdereferenceable\((?P<size>\d+)\) ptr @_ZN4mslc20threadgroup_variable[\w.$]*\(ptr [^@\n]*@" + _NAME
)


def static_threadgroup_memory(
    source: Source, constants: Constants | None = None, kernels: Collection[str] = ()
) -> dict[str, int]:
    """Kernel name to bytes: of those named, or of all."""
    return _memory(IntermediateCode.of(source, constants, kernels=kernels), _VARIABLE)


def most_static_threadgroup_memory(code: IntermediateCode) -> dict[str, int]:
    """No less than that, and quick: from code that is not optimised, with variables of branches that cannot be taken."""
    return _memory(code, _REFERENCE)


def _memory(code: IntermediateCode, variable: re.Pattern[str]) -> dict[str, int]:
    return {kernel: _reachable_memory(code, entry, variable) for kernel, entry in code.entries.items()}


def _reachable_memory(code: IntermediateCode, entry: str, variable: re.Pattern[str]) -> int:
    variables: dict[str, int] = {}
    for function in code.reached_from(entry):
        for found in variable.finditer(code.functions[function]):
            variables[found["name"]] = max(int(found["size"]), variables.get(found["name"], 0))
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in variables.values())

"""Reads the static threadgroup memory of each kernel from the compiler's LLVM IR.

Sizes that depend on template arguments are known only there. A launch may use less if it does not take a branch.
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
# Before inlining, the IR calls the shim's function, which returns a reference to the variable.
_REFERENCE = re.compile(
    r"call [^@\n]*\bdereferenceable\((?P<size>\d+)\) ptr @_ZN4mslc20threadgroup_variable[\w.$]*\(ptr [^@\n]*@" + _NAME
)


def static_threadgroup_memory(
    source: Source, constants: Constants | None = None, kernels: Collection[str] = ()
) -> dict[str, int]:
    """Maps the named kernels, or all of them, to bytes."""
    return _memory(IntermediateCode.of(source, constants, kernels=kernels), _VARIABLE)


def most_static_threadgroup_memory(code: IntermediateCode) -> dict[str, int]:
    """A quick upper bound from unoptimised code, which includes variables of dead branches."""
    return _memory(code, _REFERENCE)


def _memory(code: IntermediateCode, variable: re.Pattern[str]) -> dict[str, int]:
    return {kernel: _reachable_memory(code, entry, variable) for kernel, entry in code.entries.items()}


def _reachable_memory(code: IntermediateCode, entry: str, variable: re.Pattern[str]) -> int:
    variables: dict[str, int] = {}
    for function in code.reached_from(entry):
        for found in variable.finditer(code.functions[function]):
            variables[found["name"]] = max(int(found["size"]), variables.get(found["name"], 0))
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in variables.values())

"""Describes the kernels of a file and their parameters, and generates the entry points that the runtime calls."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field

BUFFER, THREADGROUP, BUILTIN = "buffer", "threadgroup", "builtin"

BUILTINS = frozenset(
    (
        "thread_position_in_grid",
        "threads_per_grid",
        "thread_position_in_threadgroup",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "grid_size",
        "grid_origin",
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "thread_index_in_quadgroup",
        "quadgroup_index_in_threadgroup",
        "threads_per_simdgroup",
        "thread_execution_width",
        "simdgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "quadgroups_per_threadgroup",
        "dispatch_quadgroups_per_threadgroup",
    )
)


@dataclass
class Parameter:
    name: str
    type: str  # as written in the source
    kind: str  # BUFFER, THREADGROUP or BUILTIN
    index: int = -1  # binding index of a buffer or of dynamic threadgroup memory
    builtin: str = ""  # attribute name of a builtin
    function_constant: str = ""  # the parameter exists only if this function constant is true


@dataclass
class Kernel:
    name: str  # host name
    function: str  # C++ expression for the function, with its template arguments
    parameters: list[Parameter]
    max_threads: str = ""  # max_total_threads_per_threadgroup as an expression
    line: int = 0  # line of the instantiation or definition in the preprocessed text
    file: str = ""  # set from the line markers
    file_line: int = 0
    missing_constants: list[str] = field(
        default_factory=list
    )  # function constants that the kernel needs but that have no value


@dataclass
class FunctionConstant:
    name: str
    type: str
    index: int


@dataclass
class Module:
    """All kernels and function constants that the rewriter found in one file."""

    kernels: list[Kernel] = field(default_factory=list)
    constants: list[FunctionConstant] = field(default_factory=list)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> Module:
        kernels = [Kernel(**{**k, "parameters": [Parameter(**p) for p in k["parameters"]]}) for k in data["kernels"]]
        return cls(kernels, [FunctionConstant(**c) for c in data["constants"]])


def entry_symbol(number: int) -> str:
    return f"mslc_entry_{number}"


def cpu_entry_point(number: int, kernel: Kernel) -> str:
    """Returns the definitions that make a kernel callable, on one line, for insertion where the kernel is
    instantiated."""
    entry = entry_symbol(number)
    parameters = ", ".join(_argument_type(p) for p in kernel.parameters)
    described = ", ".join(_describe(p) for p in kernel.parameters)
    table = f"static const mslc_parameter table[] = {{{described}}}; " if described else ""
    return (
        f'extern "C" MSLC_EXPORT void {entry}(const mslc_thread* self) '
        f"{{ ::mslc::Entry<{parameters}>::run({kernel.function}, *self); }} "
        f'extern "C" MSLC_EXPORT void mslc_describe_{number}(mslc_kernel* kernel) '
        f"{{ {table}*kernel = {{{_quote(kernel.name)}, {entry}, {'table' if described else 'nullptr'}, "
        f"{len(kernel.parameters)}, static_cast<unsigned>({kernel.max_threads or '0'})}}; }}"
    )


def cpu_kernel_table(kernels: list[Kernel]) -> str:
    """Returns the exported kernel table for the end of the file."""
    count = len(kernels)
    declarations = "".join(f"void mslc_describe_{i}(mslc_kernel*); " for i in range(count))
    calls = "".join(f"mslc_describe_{i}(&table[{i}]); " for i in range(count))
    return (
        f'extern "C" {{ {declarations}MSLC_EXPORT const mslc_kernel* mslc_kernels(unsigned* count) '
        f"{{ static mslc_kernel table[{max(count, 1)}]; *count = {count}; {calls}return table; }} }}\n"
    )


def _argument_type(parameter: Parameter) -> str:
    if parameter.kind == BUFFER:
        return f"::mslc::Buffer<{parameter.index}>"
    if parameter.kind == THREADGROUP:
        return f"::mslc::ThreadgroupBuffer<{parameter.index}>"
    return f"::mslc::builtin::{parameter.builtin}"


def _describe(parameter: Parameter) -> str:
    kind = {
        BUFFER: "MSLC_PARAMETER_BUFFER",
        THREADGROUP: "MSLC_PARAMETER_THREADGROUP",
        BUILTIN: "MSLC_PARAMETER_BUILTIN",
    }
    return f"{{{_quote(parameter.name)}, {_quote(parameter.type)}, {kind[parameter.kind]}, {parameter.index}}}"


def _quote(text: str) -> str:
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'

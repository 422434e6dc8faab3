"""Generates the Metal source that mx.fast.metal_kernel would: the same text and the same binding order.

As in MLX, the source depends on the call: the types of inputs and outputs, the template arguments, which inputs are
scalars (bound as references) or small (in the constant address space), and which names the body mentions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

TemplateArgument = tuple[str, "bool | int | mx.Dtype"]

# Inputs with fewer elements go to the constant address space.
MAX_CONSTANT_SIZE = 8
# MLX puts its helpers (elem_to_loc, ceildiv, ...), and with them `using namespace metal`, before every kernel.
PRELUDE = '#include "mlx/backend/metal/kernels/utils.h"\n'
_TYPES = {
    mx.bool_: "bool",
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.complex64: "complex64_t",
    **{getattr(mx, f"{sign}int{bits}"): f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}


def metal_type(dtype: mx.Dtype) -> str:
    if dtype not in _TYPES:
        raise ValueError(f"[metal_kernel] {str(dtype).removeprefix('mlx.core.')} is not supported on the GPU.")
    return _TYPES[dtype]


@dataclass(frozen=True)
class InputInfo:
    """The properties of an input that the kernel takes as arguments: those that the body names."""

    name: str
    shape: bool
    strides: bool
    ndim: bool

    @classmethod
    def of(cls, name: str, source: str) -> InputInfo:
        return cls(name, *(f"{name}_{suffix}" in source for suffix in ("shape", "strides", "ndim")))


@dataclass(frozen=True)
class GeneratedKernel:
    """One specialisation. `text` is what MLX would compile after its helpers."""

    name: str
    text: str
    header_lines: int
    body_line: int  # line of `text` where the body starts; the first line is 1
    body_lines: int

    def place(self, line: int) -> tuple[str, int]:
        """Maps a line of PRELUDE + text to one of the author's strings and a line in it."""
        line -= PRELUDE.count("\n")
        if self.body_line <= line < self.body_line + self.body_lines:
            return "source", line - self.body_line + 1
        return ("header", line) if line <= self.header_lines else ("generated", line)


def generate(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[InputInfo, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[TemplateArgument],
    atomic_outputs: bool,
) -> GeneratedKernel:
    arguments = ", ".join(_template_value(value) for _, value in template)
    function = _function_name(name, arguments, [a for _, a in inputs], [dtype for _, dtype in outputs])
    head = header
    if template:
        head += f"template <{', '.join(f'{_template_kind(value)} {key}' for key, value in template)}>\n"
    head += f"[[kernel]] void {function}(\n"
    head += ",\n".join(_parameters(source, inputs, outputs, atomic_outputs)) + ") {\n"
    text = f"{head}{source}\n}}\n"
    if template:
        instance = f"{function}<{arguments}>"
        text += f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({instance}) {instance};\n'
    return GeneratedKernel(function, text, header.count("\n"), head.count("\n") + 1, source.count("\n") + 1)


def _function_name(name: str, arguments: str, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]) -> str:
    """Builds a unique name for each specialisation, since MLX looks up compiled kernels by name."""
    parts = [f"custom_kernel_{name}"]
    if arguments:
        parts.append("_" + arguments.replace(", ", "_"))
    for array in inputs:
        passed_as = "s" if array.ndim == 0 else "c" if array.size < MAX_CONSTANT_SIZE else ""
        parts.append(metal_type(array.dtype) + passed_as)
    parts += [metal_type(dtype) for dtype in outputs]
    return "_".join(parts)


def _parameters(
    source: str,
    inputs: Sequence[tuple[InputInfo, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    atomic_outputs: bool,
) -> list[str]:
    bound: list[str] = []
    for info, array in inputs:
        space = "constant" if array.size < MAX_CONSTANT_SIZE else "device"
        bound.append(f"const {space} {metal_type(array.dtype)}{'*' if array.ndim else '&'} {info.name}")
        if array.ndim:
            bound += [f"const constant int* {info.name}_shape"] * info.shape
            bound += [f"const constant int64_t* {info.name}_strides"] * info.strides
            bound += [f"const constant int& {info.name}_ndim"] * info.ndim
    for output, dtype in outputs:
        element = f"atomic<{metal_type(dtype)}>" if atomic_outputs else metal_type(dtype)
        bound.append(f"device {element}* {output}")
    parameters = [f"  {text} [[buffer({index})]]" for index, text in enumerate(bound)]
    return parameters + [f"  {kind} {name} [[{name}]]" for name, kind in _ATTRIBUTES.items() if name in source]


def _template_kind(value: bool | int | mx.Dtype) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"


def _template_value(value: bool | int | mx.Dtype) -> str:
    return metal_type(value) if isinstance(value, mx.Dtype) else str(int(value))

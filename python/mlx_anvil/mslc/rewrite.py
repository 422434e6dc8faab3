"""Rewrites preprocessed Metal to C++ for upstream clang. The passes are independent; see lexer.TokenStream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from .entry import Kernel, Module, cpu_entry_point, cpu_kernel_table
from .host_code import reject_host_code
from .keywords import reject_misused_keywords
from .lexer import PositionMap, TokenStream
from .passes.conformance import rewrite_for_conformance
from .passes.constant_uses import note_missing_constants
from .passes.constants import rewrite_function_constants
from .passes.declarations import (
    rewrite_array_parameters,
    rewrite_logging,
    rewrite_threadgroup_variables,
    strip_attributes,
)
from .passes.kernels import EntryPoint, rewrite_kernels
from .passes.loops import rewrite_loops
from .passes.members import rewrite_members
from .passes.vectors import rewrite_vectors
from .structure import Structure


@dataclass
class Target:
    """The parts of rewriting that depend on the target machine."""

    name: str
    entry_point: EntryPoint
    kernel_table: Callable[[list[Kernel]], str]  # text at the end of the file
    conforms: bool = False  # compiled for checking only, never run


CPU = Target("cpu", cpu_entry_point, cpu_kernel_table)
CONFORMANCE = Target("cpu", cpu_entry_point, cpu_kernel_table, conforms=True)


@dataclass
class Rewritten:
    text: str
    module: Module
    positions: PositionMap


def rewrite(
    source: str,
    constants: Mapping[int | str, object] | None = None,
    target: Target = CPU,
    only: Collection[str] = (),
) -> Rewritten:
    """Rewrites preprocessed source: all kernels, or those in `only`. Raises SourceError for unknown constructs."""
    stream = TokenStream(source)
    reject_misused_keywords(stream)
    reject_host_code(stream)
    structure = Structure(stream)
    module = Module()
    rewrite_members(stream, structure)
    module.constants = rewrite_function_constants(stream, constants or {})
    module.kernels = rewrite_kernels(stream, structure, target.entry_point, only)
    note_missing_constants(stream, structure, module.kernels, module.constants, constants or ())
    rewrite_threadgroup_variables(stream, structure, target.name)
    rewrite_array_parameters(stream)
    rewrite_vectors(stream, structure)
    rewrite_loops(stream, structure)
    rewrite_logging(stream)
    strip_attributes(stream)
    if target.conforms:
        rewrite_for_conformance(stream, structure)
    text, positions = stream.render()
    table = target.kernel_table(module.kernels)
    return Rewritten(f'{text}\n#line 1 "<mslc kernel table>"\n{table}', module, positions)

"""Compiles kernels to machine code of Apple GPUs (AGX), with Mesa's open compiler, to count what they need.

Metal source becomes LLVM IR, SPIR-V and then machine code of an M1 or M2. Nothing is run. tools/agx/build.sh builds the
program that does the last step.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .agx_code import instruction_classes, machine_code
from .agx_spirv import TARGET, write_spirv
from .compiler import PRECISION_FLAGS, RELAXED_SPACES, Constants, run_compiler, run_preprocessor, run_rewriter
from .entry import BUFFER, BUILTIN, THREADGROUP, Kernel, Parameter, entry_symbol
from .preprocess import Source
from .rewrite import Rewritten, Target
from .toolchain import ToolchainError, cache_directory

INTERFACE = 1  # of agx_stats; a program with another number is of another version of tools/agx
MOST_REGISTERS, MOST_THREADS = 256, 1024
# What always fits, whatever the registers. Metal lowers the limit of a kernel that does not declare one; Mesa spills.
UNLIMITED = 384
_UNIFORMS = 128  # halves for arguments and sizes of the launch; see shim/agx/entry_agx.h
_DYNAMIC_BYTES = 16384  # of the shim's stand-in for dynamic threadgroup memory
_BETWEEN_BUFFERS = 4096

_TO_IR = [*PRECISION_FLAGS, *RELAXED_SPACES, *TARGET, "-fconvergent-functions", "-Xclang", "-disable-llvm-passes"]
_LIMIT = re.compile(r"^define [^\n]*@mslc_max_threads\(\)[^\n]*\{.*?\bret i32 (\d+)\n\}\n", re.MULTILINE | re.DOTALL)
_MESSAGE = re.compile(r"(\d+) inst, (\d+) alu, .* (\d+) scratch, .* (\d+) loops, (\d+):(\d+) spills:fills")


@dataclass
class AgxKernel:
    """What the machine code of a kernel needs. Registers and uniforms are counted in 16-bit halves."""

    name: str
    instructions: int
    classes: dict[str, int]
    registers: int
    threads: int  # of one core's 1024 that fit at once with these registers
    spills: int
    fills: int
    threadgroup_bytes: int  # without what a launch adds
    scratch_bytes: int
    uniforms: int
    code_bytes: int
    max_threads: int | None  # declared in the source
    code: str = field(default="", repr=False)

    def to_json(self) -> dict:
        return {key: value for key, value in asdict(self).items() if key != "code"}


def find_agx_stats() -> Path:
    """Returns the path of agx_stats. MLX_ANVIL_AGX names it; else it is in the cache."""
    given = os.environ.get("MLX_ANVIL_AGX")
    path = Path(given) if given else cache_directory() / "agx_stats"
    if not path.is_file() or not os.access(path, os.X_OK):
        where = f"MLX_ANVIL_AGX is '{given}', which is not a program" if given else "the AGX compiler is not built"
        raise ToolchainError(f"{where}: tools/agx/build.sh of the source tree builds it once, in a few minutes")
    return path


def compile_agx(
    source: Source | str | Path,
    kernels: Collection[str],
    constants: Constants | None = None,
    *,
    compiler_flags: Sequence[str] = (),
) -> list[AgxKernel]:
    """Compiles the named kernels of a file.

    Raises CompileError with positions in the author's files, ValueError for a kernel that the file does not have and
    for a function constant without a value, and ToolchainError if Mesa cannot compile a kernel.
    """
    program = find_agx_stats()
    if not isinstance(source, Source):
        source = Source.load(source)
    preprocessed = run_preprocessor(source)
    _check_names(run_rewriter(source, preprocessed, constants, AGX).module.kernels, kernels)
    results = []
    for name in kernels:
        rewritten = run_rewriter(source, preprocessed, constants, AGX, [name])
        kernel = rewritten.module.kernels[0]
        if kernel.missing_constants:
            missing = ", ".join(kernel.missing_constants)
            raise ValueError(f"kernel '{name}' needs a value for function constant {missing}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.spv")
            limit = _compile_spirv(source, preprocessed, rewritten, path, compiler_flags)
            results.append(_finish(kernel, limit, _run(program, kernel.name, path, limit or UNLIMITED)))
    return results


def kernel_names(source: Source, constants: Constants | None = None) -> list[str]:
    kernels = run_rewriter(source, run_preprocessor(source), constants, AGX).module.kernels
    return [kernel.name for kernel in kernels]


def _check_names(found: Sequence[Kernel], wanted: Collection[str]) -> None:
    known = {kernel.name for kernel in found}
    for name in wanted:
        if name not in known:
            some = ", ".join(sorted(known)[:4]) + (", ..." if len(known) > 4 else "")
            raise ValueError(f"there is no kernel '{name}': the file has {some or 'none'}")


def _compile_spirv(
    source: Source, preprocessed: str, rewritten: Rewritten, path: Path, compiler_flags: Sequence[str]
) -> int | None:
    """Writes the SPIR-V of a kernel. Returns the threads that it declares as its limit."""
    code = path.with_suffix(".front.ll")
    run_compiler(source, preprocessed, rewritten, [*_TO_IR, *compiler_flags, "-S", "-emit-llvm", "-o", str(code)])
    text = code.read_text(encoding="utf-8")
    limit = _LIMIT.search(text)
    write_spirv(_LIMIT.sub("", text), path)
    return int(limit[1]) if limit else None


def _run(program: Path, name: str, path: Path, threads: int) -> str:
    arguments = [str(program), str(path), entry_symbol(0), str(threads), "1", "1", str(_UNIFORMS)]
    environment = {**os.environ, "AGX_MESA_DEBUG": "shaders,internal"}
    result = subprocess.run(arguments, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if result.returncode:
        reason = result.stderr.strip().split("\n")[-1] or f"it ended with status {result.returncode}"
        raise ToolchainError(f"Mesa cannot compile kernel '{name}': {reason}")
    return result.stdout


def _finish(kernel: Kernel, limit: int | None, printed: str) -> AgxKernel:
    dump, _, last = printed.rstrip().rpartition("\n")
    try:
        found = json.loads(last)
    except ValueError:
        raise ToolchainError(f"agx_stats printed '{last[:80]}' instead of statistics") from None
    if found.get("interface") != INTERFACE:
        raise ToolchainError("agx_stats belongs to another version of mlx-anvil: run tools/agx/build.sh again")
    counts = _MESSAGE.search(found["message"])
    if counts is None:
        raise ToolchainError(f"Mesa reports its statistics in an unknown form: {found['message']}")
    instructions, _, scratch, _, spills, fills = map(int, counts.groups())
    code = machine_code(dump)
    classes = instruction_classes(code)
    if sum(classes.values()) != instructions:
        raise ToolchainError(f"Mesa's listing of kernel '{kernel.name}' does not have its {instructions} instructions")
    dynamic = _DYNAMIC_BYTES if any(p.kind == THREADGROUP for p in kernel.parameters) else 0
    return AgxKernel(
        name=kernel.name,
        instructions=instructions,
        classes=classes,
        registers=found["half_registers"],
        threads=found["threads"],
        spills=spills,
        fills=fills,
        threadgroup_bytes=max(found["threadgroup_bytes"] - dynamic, 0),
        scratch_bytes=scratch,
        uniforms=found["uniform_halves"],
        code_bytes=found["code_bytes"],
        max_threads=limit,
        code=code,
    )


# ---- generated source


def _entry_point(number: int, kernel: Kernel) -> str:
    """Returns an entry point on one line. It takes no parameters: the arguments are in uniform registers."""
    function = kernel.function
    positions = {id(p): i for i, p in enumerate(kernel.parameters)}
    buffers, threadgroup = (_of_kind(kernel, kind) for kind in (BUFFER, THREADGROUP))

    def argument(parameter: Parameter) -> str:
        type_name = f"::mslc::ParameterAt<decltype(&{function}), {positions[id(parameter)]}>::type"
        if parameter.kind == BUILTIN:
            return f"::mslc::as_parameter<{type_name}>(::mslc::builtin::{parameter.builtin}())"
        if parameter.kind == THREADGROUP:
            return f"::mslc::threadgroup_buffer<{type_name}>({_BETWEEN_BUFFERS * threadgroup.index(parameter)})"
        return f"::mslc::Passed<{type_name}>::get({buffers.index(parameter)})"

    limit = ""
    if kernel.max_threads:  # only the compiler can evaluate it
        limit = f'extern "C" MSLC_EXPORT int mslc_max_threads() {{ return {kernel.max_threads}; }} '
    arguments = ", ".join(argument(p) for p in kernel.parameters)
    return (
        f'{limit}extern "C" __attribute__((device_kernel)) MSLC_EXPORT void {entry_symbol(number)}() '
        f"{{ {function}({arguments}); }}"
    )


def _of_kind(kernel: Kernel, kind: str) -> list[Parameter]:
    return sorted((p for p in kernel.parameters if p.kind == kind), key=lambda p: p.index)


AGX = Target("agx", _entry_point, lambda kernels: "")

"""Compiles Metal source to PTX for NVIDIA GPUs, and describes how a host launches each kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .compiler import PRECISION_FLAGS, RELAXED_SPACES, run_compiler, run_preprocessor, run_rewriter
from .entry import BUFFER, BUILTIN, THREADGROUP, Kernel, Module, Parameter, entry_symbol
from .installation import install_command
from .passes.constants import DEFERRED
from .preprocess import Source
from .ptx_matrix import expand_products
from .rewrite import Target
from .toolchain import ToolchainError

ARCHITECTURES = ("sm_80", "sm_90")
GROUP_ARCHITECTURE = "sm_90a"  # of files with products of four SIMD groups (shim/ptx/product_ptx.h)
TARGET_MACRO = ("__MSLC_PTX__", "1")  # lets source choose another formulation for PTX
POINTER, VALUE, THREADGROUP_OFFSET = "pointer", "value", "threadgroup_offset"

# PTX 7.8 is the first version with bfloat arithmetic and movmatrix. Drivers of CUDA 11.8 and later accept it.
_FLAGS = ["--target=nvptx64-nvidia-cuda", "-nocudalib", "-O3", "-fconvergent-functions"]
_FLAGS += ["--cuda-feature=+ptx78", "-S"]
# Of the header and of dynamic threadgroup memory, as the compiler writes them.
_HEADER = re.compile(r"^\.version \S+\n\.target (\w+)(.*)$", re.MULTILINE)
_DYNAMIC_MEMORY = re.compile(
    r"^(\.extern \.shared \.align )16( \.b8 mslc_dynamic_threadgroup_memory\[\];)$", re.MULTILINE
)
_MATRIX = re.compile(r"\bsimdgroup_(matrix|float8x8|half8x8|bfloat8x8)\b")
_ENTRY = re.compile(
    r"^\.visible \.entry mslc_entry_(?P<number>\d+)\((?P<signature>.*?)\)[^\n]*\n\{(?P<body>.*?)\n\}",
    re.MULTILINE | re.DOTALL,
)
_PARAMETER = re.compile(
    r"^\s*\.param (?:\.align \d+ )?\.([bsuf]\d+)(?P<pointer> \.ptr)?[^\n]*?_param_\d+(?:\[(\d+)\])?", re.MULTILINE
)
_SHARED = re.compile(r"^[^\n/]*\.shared \.align (\d+) \.[bsuf](\d+)\s+([\w$]+)(?:\[(\d+)\])?;", re.MULTILINE)
# Metal's atomics have device scope at most. clang emits system scope, since it has no name for this one.
_SYSTEM_SCOPE = re.compile(r"(?<=\.)(relaxed|acquire|release|acq_rel|sc)\.sys\b")
_CONSTANT_INDEX = re.compile(r"\bfunction_constant\s*\(\s*(\d+)\s*\)")
_DEFERRED_DECLARATION = re.compile(r"^\.extern \.const [^\n]*\bmslc_function_constant_\d+;\n", re.MULTILINE)
# The suffix asks for a number of resident threadgroups if the constant is true, and else for 1.
_DEFERRED = re.compile(r"mslc_function_constant_(\d+)(?:_keeps_(\d+))?")
_DEFERRED_LOAD = re.compile(r"\bld\.const\.[bu]32(\s+%r\d+, )\[(mslc_function_constant_\d+)\];")
_RESIDENT = re.compile(
    r"^[^\n]*begin inline asm\n[^\n]*// mslc\.resident (\d+) (\d+)\n[^\n]*end inline asm\n", re.MULTILINE
)
_LIMIT = re.compile(r"^[^\n]*begin inline asm\n[^\n]*// mslc\.max_threads (\d+)\n[^\n]*end inline asm\n", re.MULTILINE)


@dataclass
class KernelParameter:
    """One parameter of the entry point, in launch order."""

    kind: str  # POINTER: a device address; VALUE: `size` bytes; THREADGROUP_OFFSET: see KernelDescription
    name: str  # as in the Metal source
    index: int  # of [[buffer(index)]] or [[threadgroup(index)]]
    size: int
    function_constant: str = ""  # the kernel does not read the parameter if this constant is false


@dataclass
class KernelDescription:
    """Describes how a host launches a kernel.

    A threadgroup is a thread block of the same three sizes, and the grid counts threadgroups. Parameters are in the
    order of the buffer indices. The buffers of dynamic threadgroup memory share one block, whose length is set at
    launch. The first buffer starts at 0, each other one at the value of its THREADGROUP_OFFSET parameter (a multiple of
    16).
    """

    name: str
    entry: str
    parameters: list[KernelParameter] = field(default_factory=list)
    threadgroup_buffers: list[int] = field(default_factory=list)
    static_threadgroup_memory: int = 0
    max_threads: int | None = None
    full_simdgroups: bool = False  # threadgroups must have a multiple of 32 threads


@dataclass
class PtxModule:
    arch: str
    text: str
    kernels: list[KernelDescription]

    def to_json(self) -> dict:
        return {"arch": self.arch, "kernels": [asdict(kernel) for kernel in self.kernels]}


def compile_ptx(
    source: Source | str | Path,
    arch: str = "sm_90",
    constants: Mapping[int | str, object] | None = None,
    *,
    compiler_flags: Sequence[str] = (),
    defers_constants: bool = False,
    only: Collection[str] = (),
) -> PtxModule:
    """Compiles the kernels of a file: all of them, or those in `only`.

    Raises CompileError with positions in the author's files, and ValueError if a function constant that a kernel reads
    has no value.

    With `defers_constants`, the loader of the text sets the function constants: it replaces each
    mslc_function_constant_<index> by 0 or 1, and mslc_function_constant_<index>_keeps_<number> by 1 or the number. When
    all are replaced, the result equals a compilation with these values.
    """
    if not isinstance(source, Source):
        source = Source.load(source)
    if not re.fullmatch(r"sm_\d+a?", arch):
        raise ValueError(f"'{arch}' is not an architecture such as sm_90")
    preprocessed = run_preprocessor(replace(source, defines=(*source.defines, TARGET_MACRO)))
    if defers_constants:
        constants = {int(index): DEFERRED for index in _CONSTANT_INDEX.findall(preprocessed)}
    rewritten = run_rewriter(source, preprocessed, constants, PTX, only)
    for kernel in rewritten.module.kernels:
        if kernel.missing_constants:
            missing = ", ".join(kernel.missing_constants)
            raise ValueError(f"kernel '{kernel.name}' needs a value for function constant {missing}")
    permuted = _MATRIX.search(preprocessed) is not None
    flags = [*PRECISION_FLAGS, *RELAXED_SPACES, *_FLAGS, f"-march={arch}", *compiler_flags]
    if permuted:
        flags.append("-DMSLC_PERMUTED_LANES")
    if defers_constants:  # unswitching would duplicate a loop for each value, which deferring is meant to avoid
        flags += ["-mllvm", "-enable-nontrivial-unswitch=false"]
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "kernels.ptx")
        run_compiler(source, preprocessed, rewritten, [*flags, "-o", str(output)])
        text = output.read_text()
    module = _finish(text, arch, rewritten.module, permuted)
    if not defers_constants:
        given = (
            {c.index: constants.get(c.index, constants.get(c.name)) for c in rewritten.module.constants}
            if constants
            else {}
        )
        module = replace(module, text=with_constants(module.text, given))
    return module


def _finish(text: str, arch: str, module: Module, permuted: bool) -> PtxModule:
    if "wgmma." in text:
        arch, text = GROUP_ARCHITECTURE, _for_group_products(text)
    text = _SYSTEM_SCOPE.sub(r"\1.gpu", expand_products(text))
    text = _DEFERRED_LOAD.sub(r"mov.b32\1\2;", _DEFERRED_DECLARATION.sub("", text))
    if re.search(rf"\[{_DEFERRED.pattern}", text):
        raise ToolchainError("the compiler reads a deferred function constant in an unknown way")
    shared = _SHARED.findall(text)
    kernels: list[KernelDescription] = []

    def finish_entry(found: re.Match) -> str:
        number, signature, body = int(found["number"]), found["signature"], found["body"]
        kernel = module.kernels[number]
        limit = _LIMIT.search(body)
        description = KernelDescription(
            name=kernel.name,
            entry=_entry_name(kernel.name),
            parameters=_describe(kernel, signature),
            threadgroup_buffers=[p.index for p in _of_kind(kernel, THREADGROUP)],
            static_threadgroup_memory=_shared_bytes(shared, body),
            max_threads=int(limit[1]) if limit else None,
            full_simdgroups=permuted,
        )
        kernels.append(description)
        # Without a minimum of resident blocks, ptxas saves registers to fit more blocks, and spills.
        resident = _RESIDENT.search(body)
        least = f"mslc_function_constant_{resident[2]}_keeps_{resident[1]}" if resident else "1"
        directive = f".maxntid {description.max_threads}, 1, 1\n.minnctapersm {least}\n" if limit else ""
        body = _RESIDENT.sub("", _LIMIT.sub("", body))
        entry = f".visible .entry {entry_symbol(number)}({signature})\n{directive}{{{body}\n}}"
        return re.sub(rf"\b{entry_symbol(number)}(?=\b|_param_)", description.entry, entry)

    text = _ENTRY.sub(finish_entry, text)
    missing = {k.name for k in module.kernels} - {k.name for k in kernels}
    if missing:
        raise ToolchainError(f"the compiler emitted no entry point for {', '.join(sorted(missing))}")
    return PtxModule(arch, text, kernels)


def _for_group_products(text: str) -> str:
    """Names the one architecture that has products of four SIMD groups. Their tiles start at multiples of 1024 bytes, and
    so does dynamic threadgroup memory."""
    text = _HEADER.sub(rf".version 8.0\n.target {GROUP_ARCHITECTURE}\2", text, count=1)
    return _DYNAMIC_MEMORY.sub(r"\g<1>1024\2", text)


def _shared_bytes(shared: list[tuple[str, str, str, str]], body: str) -> int:
    """Returns the size of the threadgroup variables that an entry refers to."""
    words, total = set(re.findall(r"[\w$]+", body)), 0
    for alignment, bits, name, length in shared:
        if name in words:
            total = -(-total // int(alignment)) * int(alignment) + int(bits) // 8 * int(length or 1)
    return total


def _entry_name(name: str) -> str:
    clean = re.sub(r"\W", "_", name)
    return clean if not clean[0].isdigit() else f"_{clean}"


def _describe(kernel: Kernel, signature: str) -> list[KernelParameter]:
    """Takes the sizes of values from the compiled signature."""
    bound = [*_of_kind(kernel, BUFFER), *_of_kind(kernel, THREADGROUP)[1:]]
    parameters = []
    for parameter, (type_name, pointer, length) in zip(bound, _PARAMETER.findall(signature), strict=True):
        kind = THREADGROUP_OFFSET if parameter.kind == THREADGROUP else POINTER if pointer else VALUE
        size = int(type_name[1:]) // 8 * int(length or 1)
        parameters.append(KernelParameter(kind, parameter.name, parameter.index, size, parameter.function_constant))
    return parameters


def _of_kind(kernel: Kernel, kind: str) -> list[Parameter]:
    """Returns the parameters of one kind, ordered by index."""
    return sorted((p for p in kernel.parameters if p.kind == kind), key=lambda p: p.index)


# ---- generated source


def _entry_point(number: int, kernel: Kernel) -> str:
    """Returns an entry point on one line, inserted at the instantiation. It looks up the arguments of the kernel."""
    function = kernel.function
    buffers, threadgroup = _of_kind(kernel, BUFFER), _of_kind(kernel, THREADGROUP)
    positions = {id(p): i for i, p in enumerate(kernel.parameters)}

    def kernel_type(parameter: Parameter) -> str:
        return f"::mslc::ParameterAt<decltype(&{function}), {positions[id(parameter)]}>::type"

    def argument(parameter: Parameter) -> str:
        if parameter.kind == BUILTIN:
            return f"::mslc::as_parameter<{kernel_type(parameter)}>(::mslc::builtin::{parameter.builtin}())"
        if parameter.kind == THREADGROUP:
            offset = "0" if parameter is threadgroup[0] else f"offset_{positions[id(parameter)]}"
            return f"::mslc::threadgroup_buffer<{kernel_type(parameter)}>({offset})"
        return f"::mslc::Passed<{kernel_type(parameter)}>::get(buffer_{positions[id(parameter)]})"

    declared = [f"::mslc::Passed<{kernel_type(p)}>::type buffer_{positions[id(p)]}" for p in buffers]
    declared += [f"uint offset_{positions[id(p)]}" for p in threadgroup[1:]]
    arguments = ", ".join(argument(p) for p in kernel.parameters)
    # Only the compiler can evaluate the limit; a comment in the assembly passes it on.
    limit = f'__asm__ volatile("// mslc.max_threads %0" :: "n"({kernel.max_threads})); ' if kernel.max_threads else ""
    return (
        f'extern "C" __attribute__((nvptx_kernel)) MSLC_EXPORT void {entry_symbol(number)}({", ".join(declared)}) '
        f"{{ {limit}{function}({arguments}); }}"
    )


PTX = Target("ptx", _entry_point, lambda kernels: "")


# ---- assembling


@dataclass
class Assembled:
    """What ptxas reports about a kernel."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def find_ptxas() -> str:
    given = os.environ.get("MLX_ANVIL_PTXAS") or shutil.which("ptxas")
    if given:
        return given
    for root in [sysconfig.get_path("purelib"), *filter(None, sys.path)]:
        for found in sorted(Path(root).glob("nvidia/*/bin/ptxas")):
            return str(found)
    raise ToolchainError(f"ptxas, the assembler of CUDA, is not installed: {install_command('ptx')}")


def with_constants(text: str, values: Mapping[int, object]) -> str:
    """Replaces the deferred function constants in the text of compile_ptx by their values, as a host's loader does."""

    def literal(found: re.Match) -> str:
        value = bool(values[int(found[1])])
        return (found[2] if value else "1") if found[2] else str(int(value))

    return _DEFERRED.sub(literal, text)


def assemble(module: PtxModule) -> dict[str, Assembled]:
    """Runs ptxas. Returns its report for each entry; raises ToolchainError if it rejects the text."""
    return _parse_report(_run_ptxas(module.text, module.arch, "-v")[1])


def cubin(text: str, arch: str) -> bytes:
    """Returns the machine code of a PTX module for `arch` as an ELF image. The result is deterministic."""
    return _run_ptxas(text, arch)[0]


def _run_ptxas(text: str, arch: str, *options: str) -> tuple[bytes, str]:
    """Returns the cubin and ptxas's messages."""
    with tempfile.TemporaryDirectory() as directory:
        path, output = Path(directory, "kernels.ptx"), Path(directory, "kernels.cubin")
        path.write_text(text)
        command = [find_ptxas(), *options, f"-arch={arch}", str(path), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise ToolchainError(f"ptxas failed:\n{result.stderr.strip()}{result.stdout.strip()}")
        return output.read_bytes(), result.stderr + result.stdout


def _parse_report(report: str) -> dict[str, Assembled]:
    results: dict[str, Assembled] = {}
    for section in re.split(r"Compiling entry function '", report)[1:]:
        name = section[: section.index("'")]

        def number(pattern: str, section: str = section) -> int:
            return sum(int(value) for value in re.findall(pattern, section))

        results[name] = Assembled(
            registers=number(r"Used (\d+) registers"),
            spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
            stack_bytes=number(r"(\d+) bytes stack frame"),
            shared_bytes=number(r"(\d+) bytes smem"),
        )
    return results

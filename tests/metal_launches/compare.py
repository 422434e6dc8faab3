"""Compares the host's launches with the kernels of the embedded Metal source."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mlx_anvil.mslc.compiler import run_preprocessor, run_rewriter
from mlx_anvil.mslc.entry import BUFFER, THREADGROUP, Kernel, Parameter
from mlx_anvil.mslc.lint import lint
from mlx_anvil.mslc.preprocess import Source
from tests.metal_launches.record import Launch

# Metal's names of the dtypes. uchar is not among them: kernels take masks of any dtype as bytes.
DTYPES = {"float": "float32", "half": "float16", "bfloat": "bfloat16", "uint": "uint32", "ulong": "uint64"}
# Arrays that are of float32 instead where this function constant is true, by kernel and binding: outputs that hold
# partial sums, frequencies that the user gave, gates of a model that computes them in float32.
FLOATS_INSTEAD = {
    ("flash_attention_decode", 7): "keys_are_in_parts",
    ("flash_attention_decode_matrix", 7): "keys_are_in_parts",
    ("flash_attention_quantized_decode", 11): "keys_are_in_parts",
    ("flash_attention_quantized_decode_matrix", 11): "keys_are_in_parts",
    ("gated_delta_forward", 3): "g_is_float32",
    ("gated_delta_forward", 4): "beta_is_float32",
    ("gated_delta_backward", 3): "g_is_float32",
    ("gated_delta_backward", 4): "beta_is_float32",
    ("gated_delta_chunk_prepare", 2): "g_is_float32",
    ("gated_delta_chunk_prepare", 3): "beta_is_float32",
    ("gated_delta_chunk_prepare_channels", 2): "g_is_float32",
    ("gated_delta_chunk_prepare_channels", 3): "beta_is_float32",
    ("gated_delta_chunk_prepare_channels_pairs", 2): "g_is_float32",
    ("gated_delta_chunk_prepare_channels_pairs", 3): "beta_is_float32",
    ("gated_delta_chunk_backward_decays", 2): "g_is_float32",
    ("gated_delta_gates", 2): "log_is_float32",
    ("gated_delta_gates", 3): "bias_is_float32",
    ("gated_delta_gates_backward", 2): "log_is_float32",
    ("gated_delta_gates_backward", 3): "bias_is_float32",
    ("gguf_plain", 2): "outputs_are_in_parts",
    ("mla_decode", 6): "keys_are_in_parts",
    ("mla_decode_group", 6): "keys_are_in_parts",
    ("quantized_plain", 4): "outputs_are_in_parts",
    ("rope_one", 2): "frequencies_are_given",
    ("rope_qk", 3): "frequencies_are_given",
    ("rope_and_cache", 6): "frequencies_are_given",
    ("kv_append_plain", 4): "frequencies_are_given",
    ("kv_append_affine", 4): "frequencies_are_given",
}
_TEMPLATE = re.compile(r"template\s*<([^<>]*)>\s*\[\[kernel.*?\]\]\s*void\s+(\w+)\s*\(", re.DOTALL)


@dataclass(frozen=True)
class Interface:
    """The kernels of an op's Metal source, as a host sees them."""

    source: Source
    templates: dict[str, list[str]]  # names of the template parameters of each kernel function
    kernels: dict[str, Kernel]
    constants: dict[int, str]  # type of each function constant, by index
    constant_names: dict[str, int]

    @classmethod
    def of(cls, source: Source) -> Interface:
        preprocessed = run_preprocessor(source)
        module = run_rewriter(source, preprocessed).module
        return cls(
            source,
            {
                found[2]: [declared.split()[-1] for declared in found[1].split(",")]
                for found in _TEMPLATE.finditer(preprocessed)
            },
            {kernel.name: kernel for kernel in module.kernels},
            {constant.index: constant.type for constant in module.constants},
            {constant.name: constant.index for constant in module.constants},
        )

    def element_type(self, kernel: Kernel, parameter: Parameter) -> str:
        """That of a pointer or reference; empty where it depends on more than a template argument."""
        name = re.sub(r"\b(const|device|constant|threadgroup)\b|[*&]", "", parameter.type).strip()
        function, arguments = _function(kernel)
        given = dict(zip(self.templates.get(function, []), arguments, strict=False))
        name = given.get(name, name)
        return name if re.fullmatch(r"\w+", name) else ""


def _function(kernel: Kernel) -> tuple[str, list[str]]:
    """Name and template arguments."""
    name, _, arguments = kernel.function.replace(" ", "").removeprefix("::").partition("<")
    return name, arguments.removesuffix(">").split(",") if arguments else []


def misfits(interface: Interface, launches: Collection[Launch]) -> list[str]:
    """Everything in which the launches of an op and its kernels differ; empty if nothing does."""
    found: dict[str, None] = {}  # each once, in order
    asserts: dict[str, str] = {}  # conditions that only the compiler can tell, with what is wrong where they are false
    for launch in sorted(launches, key=repr):
        kernel = interface.kernels.get(launch.kernel)
        if kernel is None:
            found[f"{launch.op}: the host asks for {launch.kernel}, which the Metal source does not have"] = None
            continue
        for problem in (
            *_bindings(interface, kernel, launch, asserts),
            *constant_misfits(interface, kernel, launch.constants),
        ):
            found[f"{kernel.name}: {problem}"] = None
        if kernel.max_threads:
            asserts[f"{launch.threads} <= {kernel.max_threads}"] = (
                f"{kernel.name}: the host launches {launch.threads} threads per threadgroup, more than it allows"
            )
    for name in sorted(interface.kernels.keys() - {launch.kernel for launch in launches}):
        found[f"{name}: no call of the host asks for it"] = None
    return [*found, *_false(interface, asserts)]


def _bindings(interface: Interface, kernel: Kernel, launch: Launch, asserts: dict[str, str]) -> Iterator[str]:
    declared = {p.index: p for p in kernel.parameters if p.kind == BUFFER}
    bound = [binding for binding in launch.bindings if not binding.startswith("threadgroup")]
    if max(declared) != len(bound) - 1:
        yield f"has bindings 0 to {max(declared)}; the host binds 0 to {len(bound) - 1}"
        return
    for index, binding in enumerate(bound):
        kind, direction, *alias = binding.split()
        if index not in declared:
            if direction != "in":
                yield f"has no buffer({index}), which the host binds as '{binding}'"
            continue
        parameter = declared[index]
        words = set(parameter.type.split())
        place = f"buffer({index}) is '{parameter.type} {parameter.name}'; the host binds '{binding}'"
        if kind == "params":
            if not {"constant", "&"} <= words:
                yield place
            struct = interface.element_type(kernel, parameter)
            asserts[f"sizeof({struct}) == {direction}"] = f"params: the host gives {struct} {direction} bytes"
        elif "*" not in words or (direction == "out") != ("device" in words and "const" not in words):
            yield place
        else:
            expected = DTYPES.get(interface.element_type(kernel, parameter))
            if _holds_floats_instead(interface, kernel, index, launch):
                expected = "float32"
            if expected and not alias and kind != expected:  # what stands in for a missing array has any dtype
                yield place
    dynamic = sum(p.kind == THREADGROUP for p in kernel.parameters)
    if dynamic != len(launch.bindings) - len(bound):
        yield f"takes {dynamic} blocks of threadgroup memory; the host gives {len(launch.bindings) - len(bound)}"


def _holds_floats_instead(interface: Interface, kernel: Kernel, index: int, launch: Launch) -> bool:
    constant = FLOATS_INSTEAD.get((_function(kernel)[0], index))
    return constant is not None and launch.constants.get(interface.constant_names[constant], False)


def constant_misfits(interface: Interface, kernel: Kernel, constants: Collection[int]) -> Iterator[str]:
    """`constants`: the indices of those that the host gives."""
    for index in constants:
        if interface.constants.get(index) != "bool":
            yield f"function constant {index} is {interface.constants.get(index, 'none')} in the source, bool to the host"
    for name in kernel.missing_constants:
        if interface.constant_names[name] not in constants:
            yield f"needs function constant {interface.constant_names[name]} ({name}), which the host does not give"


def _false(interface: Interface, asserts: dict[str, str]) -> list[str]:
    """What is said of those conditions that are false behind the Metal source."""
    text = "".join(f'static_assert({condition}, "{message}");\n' for condition, message in sorted(asserts.items()))
    source = Source(text=f"{interface.source.text}\n{text}", name=interface.source.name)
    return [d.message for d in lint(source) if d.severity == "error"]

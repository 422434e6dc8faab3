"""What Apple's headers refuse of matmul2d is refused here, at the author's line; the twin beside it compiles."""

import pytest

from mlx_anvil.mslc import Library, Source
from mlx_anvil.mslc.agx import compile_agx
from mlx_anvil.mslc.conformance import conformance
from mlx_anvil.mslc.diagnostics import CompileError
from mlx_anvil.mslc.ptx import compile_ptx
from tests.mslc.tensor_kernels import HEAD, METAL_4, product_kernel
from tests.mslc.test_agx import needs_agx

TYPES = ("half", "half", "float")


def compiled(text, **defines):
    return Library(Source.load(HEAD + text, defines={**METAL_4, **defines}))


def refused(text):
    with pytest.raises(CompileError) as caught:
        compiled(text)
    return caught.value.diagnostics


def operands(run, types=TYPES, shape=(16, 32, 16), scope="execution_simdgroup", k=None):
    """A kernel with the operands a, b and d of a product, and tensors ta, tb and td of theirs."""
    m, n, inner = shape
    a, b, d = types
    views = [
        f"tensor<device {t}, dextents<int, 2>, tensor_inline> t{name}({name}s, dextents<int, 2>(64, 64));"
        for t, name in zip(types, "abd", strict=True)
    ]
    return f"""
kernel void k(device {a}* as [[buffer(0)]], device {b}* bs [[buffer(1)]], device {d}* ds [[buffer(2)]]) {{
  matmul2d<matmul2d_descriptor({m}, {n}, {inner if k is None else k}), {scope}> op;
  {" ".join(views)}
  {run}
}}
"""


REGISTERS = """auto a = op.get_left_input_cooperative_tensor<{0}, {1}, {2}>();
  auto b = op.get_right_input_cooperative_tensor<{0}, {1}, {2}>();
  auto d = op.get_destination_cooperative_tensor<decltype(a), decltype(b), {2}>();
"""
LEFT, DESTINATION = (
    REGISTERS.split("\n")[0],
    "auto d = op.get_destination_cooperative_tensor<decltype(ta), decltype(tb), float>();",
)


def in_registers(types=TYPES, shape=(16, 32, 16), run="op.run(a, b, d);"):
    return operands(REGISTERS.format(*types) + "  " + run, types, shape)


CASES = {
    "no dimension of 32": (
        in_registers(shape=(16, 16, 16)),
        in_registers(shape=(16, 16, 32)),
        "at least one of M, N, or K must be 32 if both inputs are cooperative tensors",
    ),
    "M of 64 in registers": (
        in_registers(shape=(64, 32, 16)),
        in_registers(shape=(32, 32, 16)),
        "M must be 16 or 32 if both inputs are cooperative tensors",
    ),
    "N of 48 in registers": (
        in_registers(shape=(16, 48, 32)),
        operands("op.run(ta, tb, td);", shape=(16, 48, 32)),
        "N must be 16 or 32 if both inputs are cooperative tensors",
    ),
    "K of 64 in registers": (
        in_registers(shape=(16, 32, 64)),
        operands(f"{LEFT.format(*TYPES)} op.run(a, tb, td);", shape=(16, 32, 64)),
        "K must be 16 or 32 if both inputs are cooperative tensors",
    ),
    "K of 8": (
        operands("op.run(ta, tb, td);", shape=(16, 32, 8)),
        operands("op.run(ta, tb, td);", shape=(16, 32, 16)),
        "K must be dynamic or a multiple of 16",
    ),
    "M and N of 8": (
        operands("op.run(ta, tb, td);", shape=(8, 8, 16)),
        operands("op.run(ta, tb, td);", shape=(16, 16, 16)),
        "at least one of M or N must be a multiple of 16",
    ),
    "dynamic K in registers": (
        operands(f"{LEFT.format(*TYPES)} op.run(a, tb, td);", k="static_cast<int>(dynamic_extent)"),
        operands("op.run(ta, tb, td);", k="static_cast<int>(dynamic_extent)"),
        "inner dimension cannot be dynamic with input cooperative tensors",
    ),
    "int8 products in half": (
        in_registers(("int8_t", "int8_t", "half")),
        in_registers(("half", "int8_t", "half")),
        "unsupported type",
    ),
    "char is not int8_t": (
        in_registers(("char", "char", "int")),
        in_registers(("int8_t", "int8_t", "int")),
        "unsupported type",
    ),
    "bfloat products in half": (
        in_registers(("bfloat", "bfloat", "half")),
        in_registers(("bfloat", "half", "half")),
        "unsupported type",
    ),
    "left and right exchanged": (
        in_registers(run="op.run(b, a, d);"),
        in_registers(),
        "left operand must be a tensor or matmul2d left input cooperative tensor",
    ),
    "tensors of other types": (
        operands(f"{DESTINATION} op.run(tb, ta, d);", ("half", "bfloat", "float")),
        operands(f"{DESTINATION} op.run(ta, tb, d);", ("half", "bfloat", "float")),
        "input types must match cooperative tensor types",
    ),
    "a load of another type": (
        operands(f"{DESTINATION} d.load(ta);"),
        operands(f"{DESTINATION} d.load(td);"),
        "source tensor datatype does not match cooperative tensor",
    ),
    "four SIMD groups": (
        operands("op.run(ta, tb, td);", scope="execution_simdgroups<4>"),
        operands("op.run(ta, tb, td);", scope="execution_simdgroups<1>"),
        "mslc runs matmul2d for one SIMD group",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_products(case):
    wrong, right, message = CASES[case]
    found = [d for d in refused(wrong) if message in d.message]
    assert found
    assert {d.file for d in found} == {"kernel.metal"}
    assert all("op" in d.source_line or "auto" in d.source_line or "load" in d.source_line for d in found)
    compiled(right)


def test_the_header_needs_metal_4():
    text = HEAD + "kernel void k(device float* x [[buffer(0)]]) { x[0] = 1; }\n"
    with pytest.raises(CompileError, match="MetalPerformancePrimitives needs Metal 4") as caught:
        Library(text)
    assert [(d.file, d.line) for d in caught.value.diagnostics] == [("kernel.metal", 3)]
    Library(text, defines=METAL_4)
    assert [(d.file, d.line, "(metal3.1, metal3.2)" in d.message) for d in conformance(Source(text))] == [
        ("kernel.metal", 3, True)
    ]


def test_names_come_with_their_headers():
    use = "using T = metal::tensor<device float, metal::dextents<int, 2>, metal::tensor_inline>;\n"
    kernel = (
        use
        + "kernel void k(device float* x [[buffer(0)]]) { T t(x, metal::dextents<int, 2>(4, 4)); x[0] = t.extents().extent(1); }\n"
    )
    header = "#include <metal_stdlib>\n#include <metal_tensor>\n"
    Library(header + kernel, defines=METAL_4)
    with pytest.raises(CompileError, match="tensor"):
        Library(header + kernel)
    with pytest.raises(CompileError, match="tensor"):
        Library("#include <metal_stdlib>\n" + kernel, defines=METAL_4)


def test_a_macro_tells_that_there_are_tensors():
    text = "#include <metal_stdlib>\n#ifndef __HAVE_TENSOR__\n#error none\n#endif\nkernel void k() {}\n"
    Library(text, defines=METAL_4)
    with pytest.raises(CompileError, match="none"):
        Library(text)


def test_own_kernels_conform():
    text = HEAD + product_kernel(TYPES, (16, 32, 16))
    found = [str(d) for d in conformance(Source(text), ["metal4.0", "metal4.1"])]
    assert found == []


PRODUCT = Source.load(HEAD + product_kernel(TYPES, (16, 32, 16)), defines=METAL_4)


def test_ptx_refuses_it():
    with pytest.raises(CompileError, match="run in the simulator only"):
        compile_ptx(PRODUCT)


@needs_agx
def test_machine_code_and_estimates_of_older_apple_gpus_refuse_it():
    with pytest.raises(CompileError, match="run in the simulator only"):
        compile_agx(PRODUCT, ["k"])

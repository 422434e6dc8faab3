"""Keywords of Metal belong to no namespace and name nothing: every compile says so, at their line and column."""

import pytest

from mlx_anvil.mslc import CompileError, Library, ptx

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void k(device float* x [[buffer(0)]]) {{\n  {body}\n}}\n"


def error(body: str, declarations: str = "") -> tuple[int, int, str]:
    with pytest.raises(CompileError) as raised:
        Library(HEAD + declarations + KERNEL.format(body=body))
    first = raised.value.diagnostics[0]
    return first.line, first.column, first.message


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("x[0] = metal::as_type<float>(1);", "as_type"),
        ("x[0] = metal :: as_type<float>(1);", "as_type"),
        ("x[0] = ::as_type<float>(1);", "as_type"),
        ("x[0] = ::metal::as_type<float>(1);", "as_type"),
        ("namespace m = metal; x[0] = m::as_type<float>(1);", "as_type"),
        ("using metal::as_type; x[0] = as_type<float>(1);", "as_type"),
        ("x[0] = metal::static_cast<float>(1);", "static_cast"),
        ("x[0] = *metal::reinterpret_cast<device float*>(x);", "reinterpret_cast"),
        ("metal::device float* p = x; p[0] = 0;", "device"),
        ("metal::thread float t = 0; x[0] = t;", "thread"),
        ("metal::threadgroup float t; t = x[0];", "threadgroup"),
        ("const metal::constant float* c = nullptr;", "constant"),
        ("metal::float x2 = 0; x[0] = x2;", "float"),
        ("x[0] = metal::sizeof(float);", "sizeof"),
    ],
)
def test_no_keyword_is_a_member_of_a_namespace(body, word):
    line, column, message = error(body)
    assert (line, column) == (4, 3 + body.index(word)), message
    assert f"'{word}' is a keyword and belongs to no namespace" in message


def test_a_qualified_keyword_in_a_macro_is_found_where_the_macro_is_used():
    line, _, message = error("x[0] = BITS(1);", "#define BITS(v) metal::as_type<float>(v)\n")
    assert (line, message) == (5, "'metal::as_type': 'as_type' is a keyword and belongs to no namespace")


def test_qualified_kernel_is_no_kernel():
    with pytest.raises(CompileError, match="'metal::kernel': 'kernel' is a keyword"):
        Library(HEAD + "metal::kernel void k(device float* x [[buffer(0)]]) {}\n")


@pytest.mark.parametrize("body", ["int as_type = 3;", "x[0] = as_type(1);", "struct S { int as_type; };"])
def test_a_cast_operator_is_not_a_name(body):
    line, column, message = error(body)
    assert (line, column) == (4, 3 + body.index("as_type"))
    assert message == "'as_type' is a cast operator: as_type<T>(x)"


def test_the_ptx_target_has_the_same_keywords():
    with pytest.raises(CompileError, match="'metal::as_type': 'as_type' is a keyword"):
        ptx.compile_ptx(HEAD + KERNEL.format(body="x[0] = metal::as_type<float>(1);"), "sm_90")


def test_types_and_functions_of_the_library_are_members():
    Library(HEAD + KERNEL.format(body="x[0] = as_type<float>(metal::uint(1)) + metal::float2(::metal::sin(1.0f)).x;"))

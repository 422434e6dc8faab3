import pytest

from mlx_anvil.mslc import CompileError, Library, Source
from mlx_anvil.mslc.diagnostics import author_words
from mlx_anvil.mslc.lint import lint
from mlx_anvil.mslc.preprocess import preprocess

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def errors(source: str) -> list[tuple[int, int, str]]:
    with pytest.raises(CompileError) as error:
        Library(HEAD + source)
    return [(d.line, d.column, d.message) for d in error.value.diagnostics]


def test_errors_name_line_and_column_as_written():
    line = "  float4 a = float4(x[t]) + half4(1)  *  missing;"
    ((found_line, column, message),) = errors(
        "kernel void f(const device float4* x [[buffer(0)]], uint t [[thread_position_in_grid]]) {\n" + line + "\n}\n"
    )
    assert (found_line, column) == (4, line.index("missing") + 1)
    assert message == "use of undeclared identifier 'missing'"


def test_errors_in_macros_name_the_use():
    line = "  SQUARE(float2(1, 2)) + nope;"
    source = f"#define SQUARE(a) ((a) * (a))\nvoid f() {{\n{line}\n}}\nkernel void k() {{ f(); }}\n"
    ((found_line, column, _),) = errors(source)
    assert (found_line, column) == (5, line.index("nope") + 1)


def test_errors_in_the_library_are_reported_where_it_was_called():
    line = "  uint b = as_type<uint>(half(1));"
    found = errors(f"kernel void k() {{\n{line}\n}}\n")
    assert found[0][0] == 4
    assert "as_type" in found[0][2]


def test_unsupported_parameters_are_reported_with_their_place():
    ((line, column, message),) = errors(
        "kernel void k(device float* x [[buffer(0)]],\n   sampler s [[sampler(0)]]) {}\n"
    )
    assert (line, column) == (4, 14)
    assert "sampler" in message


def test_missing_include_is_an_error():
    ((line, _, message),) = errors('#include "not_there.h"\n')
    assert line == 3
    assert "not_there.h" in message


def test_headers_are_looked_for_beside_the_source(tmp_path, monkeypatch):
    for folder, kind in (("source", "float"), ("elsewhere", "int")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kind.h").write_text(f"using Kind = {kind};\n")
    main = tmp_path / "source" / "main.metal"
    main.write_text(HEAD + '#include "kind.h"\nkernel void k(device Kind* x [[buffer(0)]]) { *x = 0.5; }\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "using Kind = float;" in preprocess(Source.load(main))


def test_included_files_are_named(tmp_path):
    (tmp_path / "helper.h").write_text("inline float g(float x) { return x + oops; }\n")
    main = tmp_path / "main.metal"
    main.write_text(HEAD + '#include "helper.h"\nkernel void k(device float* x [[buffer(0)]]) { *x = g(1); }\n')
    with pytest.raises(CompileError) as error:
        Library(main)
    (found,) = error.value.diagnostics
    assert found.file == str(tmp_path / "helper.h")
    assert (found.line, found.column) == (1, 38)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("threadgroup float* p = x;", "cannot initialize a variable of type 'threadgroup float *'"),
        ("thread float* p = x;", "cannot initialize a variable of type 'float *'"),
        ("g(&x[0]);", "no matching function for call to 'g'"),
    ],
)
def test_lint_rejects_mixed_address_spaces(statement, message):
    source = (
        HEAD
        + f"void g(thread float* p) {{ *p = 1; }}\nkernel void k(device float* x [[buffer(0)]]) {{\n  {statement}\n}}\n"
    )
    (found,) = [d for d in lint(Source(source)) if d.severity == "error"]
    assert found.message.startswith(message)
    assert found.line == 5


def test_lint_accepts_struct_copies_from_constant_memory():
    source = (
        HEAD
        + "struct P { int n; float s; };\nkernel void k(constant P& p [[buffer(0)]], device P* o [[buffer(1)]]) {\n"
    )
    assert lint(Source(source + "  P q = p; P r = *o; o[0].n = q.n + r.n;\n}\n")) == []


def test_messages_use_metal_words():
    assert (
        author_words("'__global _Float16 *' to '__local unsigned int *'") == "'device half *' to 'threadgroup uint *'"
    )
    assert author_words("vec<unsigned int, 4>") == "uint4"
    assert author_words("'half' (aka '_Float16')") == "'half'"

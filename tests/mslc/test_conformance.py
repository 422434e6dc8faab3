"""The conformance check: our kernels pass, code that Apple's compiler refuses does not, and MLX's kernels are the
control."""

from pathlib import Path

import pytest

from mlx_anvil.mslc import Source
from mlx_anvil.mslc.compiler import run_preprocessor, run_rewriter
from mlx_anvil.mslc.conformance import STANDARDS, conformance, repeated_names

METAL = Path(__file__).resolve().parents[2] / "metal"
FILES = sorted(METAL.glob("*/*.metal"))
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ {body} }}\n"


def load(path: Path) -> Source:
    return Source.load(path, [METAL.parent])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_kernels_conform(path):
    assert [str(problem) for problem in conformance(load(path))] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_function_constants_are_booleans(path):
    """A pipeline takes milliseconds to build: never one for each shape."""
    source = load(path)
    constants = run_rewriter(source, run_preprocessor(source)).module.constants
    assert [c.name for c in constants if c.type != "bool"] == []


def test_host_names_are_unique_over_all_ops():
    sources = [load(path) for path in FILES]
    kernels = [k.name for s in sources for k in run_rewriter(s, run_preprocessor(s)).module.kernels]
    assert len(kernels) > 400
    assert repeated_names(kernels) == []


def findings(declarations: str, body: str = "x[i] = 0;") -> list[str]:
    return [d.message for d in conformance(Source(HEAD + declarations + KERNEL.format(body=body)))]


def test_plain_kernel_conforms():
    declarations = "constant float c = 2;\nstruct S { static constant constexpr const int n = 3; };\n"
    assert findings(declarations, "int a[S::n] = {1, 2, 3}; x[i] = a[i % 3] * c;") == []


@pytest.mark.parametrize(
    ("declarations", "body", "message"),
    [
        ("", "auto f = [&](int y) { return y; }; x[i] = f(1);", "Metal has lambdas only since version 3.2"),
        ("", "double d = 1; x[i] = d;", "'double': Metal does not have this type"),
        ("", "goto end; end: x[i] = 0;", "'goto': Metal does not have it"),
        ("", "static int n = 0; x[i] = n;", "a static variable must be 'constant'"),
        ("", "float fragment = 1; x[i] = fragment;", "'fragment' is a Metal keyword, not a name"),
        ("float g = 1;\n", "x[i] = g;", "a variable outside functions must be 'constant'"),
        ("struct S { virtual void f() {} };\n", "x[i] = 0;", "'virtual': Metal has no run-time types"),
        (
            "struct P { int a; int b; };\n",
            "auto [a, b] = P{1, 2}; x[i] = a + b;",
            "structured binding declarations are",
        ),
        (
            "template <typename... T> int sum(T... t) { return (t + ...); }\n",
            "x[i] = sum(1, 2);",
            "pack fold expression is",
        ),
        (
            "template <typename T> T f(T n) { return n > 0 ? n * f(n - 1) : 1; }\n",
            "x[i] = f(int(i));",
            "recursive function",
        ),
        (
            "int g(int n);\nint f(int n) { return n > 0 ? g(n - 1) + 1 : 1; }\nint g(int n) { return f(n / 2) * 3; }\n",
            "x[i] = f(int(i));",
            "recursive function",
        ),
        (
            "constant bool a [[function_constant(3)]];\nconstant bool b [[function_constant(3)]];\n",
            "x[i] = a + b;",
            "function constant 3 is declared twice",
        ),
        ("", "threadgroup float t[8193]; t[i % 8193] = x[i]; x[i] = t[i];", "32784 bytes of threadgroup memory"),
        ("", "threadgroup float* p = x; *p = 0;", "cannot initialize a variable of type 'threadgroup float *'"),
    ],
)
def test_what_metal_lacks_is_named(declarations, body, message):
    assert any(message in found for found in findings(declarations, body)), findings(declarations, body)


def test_bindings_out_of_range():
    text = (
        HEAD
        + "kernel void k(device float* x [[buffer(31)]], device float* y [[buffer(1)]], device float* z [[buffer(1)]]) {}"
    )
    messages = [d.message for d in conformance(Source(text))]
    assert "kernel 'k' binds buffer(31); the last index is 30" in messages
    assert "kernel 'k' binds buffer(1) twice" in messages


def test_repeated_host_name():
    template = "template <typename T> [[kernel]] void k(device T* x [[buffer(0)]]) { x[0] = 1; }\n"
    instance = 'template [[host_name("k_{0}")]] [[kernel]] decltype(k<{1}>) k<{1}>;\n'
    source = Source(HEAD + template + instance.format("f", "float") + instance.format("f", "half"))
    assert "two kernels are named 'k_f'" in [d.message for d in conformance(source)]


def test_place_of_a_finding():
    (found,) = conformance(Source(HEAD + KERNEL.format(body="\n  int vertex = 1;"), name="mine.metal"))
    assert (found.file, found.line, found.column) == ("mine.metal", 4, 7)


MEMBER = "struct S {{ float a; float f() const {0} {{ return a; }} }};\n"
ON_OBJECT = "kernel void k(device float* x [[buffer(0)]], {0} S& s [[buffer(1)]]) {{ x[0] = s.f(); }}\n"


@pytest.mark.parametrize("space", ["device", "constant"])
def test_a_member_takes_objects_of_the_space_that_it_names(space):
    assert conformance(Source(HEAD + MEMBER.format(space) + ON_OBJECT.format(space))) == []


@pytest.mark.parametrize(
    ("space", "refused_in"), [("device", ["metal3.1", "metal3.2", "metal4.0"]), ("constant", list(STANDARDS))]
)
@pytest.mark.parametrize("standard", STANDARDS)
def test_a_member_without_a_space_takes_objects_of_others_since_4_1(standard, space, refused_in):
    found = conformance(Source(HEAD + MEMBER.format("") + ON_OBJECT.format(space)), [standard])
    assert [d.message.split(" with ")[0] for d in found] == [
        "cannot initialize object parameter of type 'const S'" for _ in range(standard in refused_in)
    ]


def test_a_member_of_another_space_is_no_help():
    assert len(conformance(Source(HEAD + MEMBER.format("device") + ON_OBJECT.format("constant")))) == 1


@pytest.mark.parametrize(
    ("body", "since"),
    [
        ("auto f = [](float a) { return a; }; x[i] = f(1);", "metal3.2"),
        ("if (float a = x[i]; a > 0) x[i] = 1;", "metal4.0"),
    ],
)
@pytest.mark.parametrize("standard", STANDARDS)
def test_language_versions_differ(standard, body, since):
    found = conformance(Source(HEAD + KERNEL.format(body=body)), [standard])
    assert (found == []) == (STANDARDS[standard] >= STANDARDS[since]), found


def test_a_finding_says_which_versions_have_it():
    text = HEAD + KERNEL.format(body="auto f = [](float a) { return a; }; x[i] = f(1);")
    assert [d.message for d in conformance(Source(text))] == ["Metal has lambdas only since version 3.2 (metal3.1)"]

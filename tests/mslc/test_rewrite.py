import pytest

from mlx_anvil.mslc.lexer import SourceError
from mlx_anvil.mslc.rewrite import rewrite


def squeeze(text: str) -> str:
    return " ".join(text.split()).replace(" ;", ";")


def body(source: str, **kwargs) -> str:
    return squeeze(rewrite(source, **kwargs).text.split("\n#line 1")[0])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("float4 f() { return float4(1, 2, 3, 4); }", "return ::mslc::make<float4>(1, 2, 3, 4);"),
        ("void f() { auto a = metal::vec<T, 2>(x); }", "auto a = ::mslc::make<metal::mslc_any_vec<T, 2>>(x);"),
        ("void f() { int2 v(a, b); }", "int2 v = ::mslc::make<int2>(a, b);"),
        ("void f() { half4 h = (half4)x; }", "half4 h = ::mslc::make<half4>(x);"),
        ("void f() { g((float4)(half4)x.xyzw * y); }", "g(::mslc::make<float4>(::mslc::make<half4>(x.xyzw)) * y);"),
        ("void f() { g(-(float4)x[1] + y); }", "g(-::mslc::make<float4>(x[1]) + y);"),
        ("void f() { g((float4)-h(x)); }", "g(::mslc::make<float4>(-h(x)));"),
        ("void f() { g((int2)(device int2*)p); }", "g(::mslc::make<int2>((device int2*)p));"),
        ("void f() { g((T)(half2)h<int>(x)[0]); }", "g((T)::mslc::make<half2>(h<int>(x)[0]));"),
        ("struct S { float2 v; S(T a) : v(a, 1), n(a) {} int n; };", ": v(::mslc::make<float2>(a, 1)), n(a) {}"),
        ("struct S { vec<T, 2> v; };", "struct S { mslc_any_vec<T, 2> v; };"),
        ("template <class T, int N> void f(vec<T, N> v);", "void f(vec<T, N> v);"),
        ("bool f(vec<bool, 3> v);", "bool f(mslc_any_vec<bool, 3> v);"),
        ("typedef vec<T, 2> frag; void f() { g(frag(0)); }", "g(::mslc::make<frag>(0));"),
        ("template <class U> using V = vec<U, 2>; void f() { V<int>(0); }", "::mslc::make<V<int>>(0);"),
        ("void f() { int i = static_cast<int>(x); }", "int i = ::mslc::cast<int>(x);"),
        ("int2 f(int2 a, int2 b);", "int2 f(int2 a, int2 b);"),
        ("void f() { g(sizeof(float4)); }", "g(sizeof(float4));"),
    ],
)
def test_vectors(source, expected):
    assert expected in body(source)


def test_of_qualified_members_the_plain_one_stays():
    source = "struct S { S(int a) thread : x(a) {} S(int a) device : x(a) {} int g() const { return 1; } int x; };"
    assert body(source) == "struct S { S(int a) thread : x(a) {} int g() const { return 1; } int x; };"


def test_a_lone_qualified_member_loses_its_qualifier():
    assert "S(int a) : x(a) {}" in body("struct S { S(int a) constant : x(a) {} int x; };")


def test_threadgroup_variables_become_references():
    text = body("void f() { threadgroup float a[M > 1 ? 2 : 3], b; threadgroup float* p = a; }")
    assert "auto& a = ::mslc::threadgroup_variable< float [(M > 1 ? 2 : 3)]>(&a_variable)" in text
    assert "auto& b = ::mslc::threadgroup_variable<float >(&b_variable);" in text
    assert "threadgroup float* p = a;" in text


def test_threadgroup_variables_keep_their_alignment():
    text = body("void f() { alignas(16) alignas(float4) threadgroup half a[8], b; }")
    assert "struct alignas(16) alignas(float4) a_alignment {};" in text
    assert "auto& a = ::mslc::threadgroup_variable< half [(8)]>(&a_variable, alignof(a_alignment));" in text
    assert "auto& b = ::mslc::threadgroup_variable<half >(&b_variable, alignof(a_alignment));" in text


@pytest.mark.parametrize(
    ("declaration", "value", "expected"),
    [
        ("constant bool b [[function_constant(3)]];", True, "= true;"),
        ("constant int n [[function_constant(3)]];", -4, "= int(-4l);"),
        ("static constant constexpr const int n [[function_constant(3)]];", 4, "= int(4l);"),
        ("constant float s [[function_constant(3)]];", 0.1, "= float(0x1.999999999999ap-4f);"),
        ("constant bool b [[function_constant(3)]];", None, "= bool(0);"),
        ("constant int n [[function_constant(03)]];", 5, "= int(5l);"),
    ],
)
def test_function_constants(declaration, value, expected):
    result = rewrite(declaration, {} if value is None else {3: value})
    text = squeeze(result.text)
    assert expected in text
    assert text.count("static ") - text.count("static mslc") == 1
    assert text.count("constexpr") == 1
    assert [c.index for c in result.module.constants] == [3]


def test_function_constants_are_given_by_name_too():
    source = "constant bool b [[function_constant(3)]]; constant bool d = is_function_constant_defined(b);"
    assert "constant bool d = true;" in body(source, constants={"b": False})
    assert "constant bool d = false;" in body(source)


def test_kernel_table():
    source = """
template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(N * 32)]] void add(
    const device T* a [[buffer(0)]], device T* b [[buffer(2), function_constant(has_b)]],
    threadgroup T* shared [[threadgroup(1)]], constant const int& n, uint3 t [[thread_position_in_grid]]) {}
template [[host_name("add_" "half")]] [[kernel]] decltype(add<half, 4>) add<half, 4>;
template [[host_name("add_int")]] kernel void add<int, 8>(const device int*, device int*, threadgroup int*, uint3);
kernel void plain(device float* x) {}
"""
    kernels = rewrite(source).module.kernels
    assert [k.name for k in kernels] == ["add_half", "add_int", "plain"]
    assert kernels[0].function == ":: add < half , 4 >"
    assert [(p.name, p.kind, p.index) for p in kernels[0].parameters] == [
        ("a", "buffer", 0),
        ("b", "buffer", 2),
        ("shared", "threadgroup", 1),
        ("n", "buffer", 1),
        ("t", "builtin", -1),
    ]
    assert kernels[0].parameters[1].function_constant == "has_b"
    assert kernels[0].parameters[0].type == "const device T *"
    assert kernels[2].parameters[0].index == 0


@pytest.mark.parametrize(
    ("source", "words", "line"),
    [
        ("\nkernel void f(texture2d<float> t [[texture(0)]]) {}", "texture", 2),
        ("kernel void f(uint t) {}", "no attribute", 1),
        ("kernel int f() { return 0; }", None, 1),
        ('template [[host_name("x")]] [[kernel]] decltype(g<int>) g<int>;', "not one", 1),
        ("kernel void f() {}\nkernel void f() {}", "two kernels", 2),
    ],
)
def test_unsupported_source_is_an_error_with_a_place(source, words, line):
    if words is None:
        assert rewrite(source).module.kernels == []  # `kernel` is an ordinary name there
        return
    with pytest.raises(SourceError, match=words) as error:
        rewrite(source)
    assert error.value.position[0] == line


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("while (g()) {}", "while (::mslc::count_step(), g()) {}"),
        ("do {} while (h());", "while (::mslc::count_step(), h());"),
        ("while ((x = g())) {}", "while (::mslc::count_step(), (x = g())) {}"),
        ("while (int y = g()) {}", "while (int y = (::mslc::count_step(), g())) {}"),
        ("for (;;) {}", "for (;::mslc::count_step(), true;) {}"),
        ("for (int i = 0;; ++i) {}", "for (int i = 0;::mslc::count_step(), true; ++i) {}"),
        ("for (uint i = n; i >= 0; --i) {}", "for (uint i = n; ::mslc::count_step(), i >= 0; --i) {}"),
        ("for (uchar i = 0; i < n; ++i) {}", "for (uchar i = 0; ::mslc::count_step(), i < n; ++i) {}"),
        ("for (int i = 0; i < n; --i) {}", "for (int i = 0; ::mslc::count_step(), i < n; --i) {}"),
        ("for (int i = 0; i < n; i *= 2) {}", "for (int i = 0; ::mslc::count_step(), i < n; i *= 2) {}"),
        ("for (int i = 0; i < n || b; ++i) {}", "for (int i = 0; ::mslc::count_step(), i < n || b; ++i) {}"),
        ("for (int i = 0; i != n; i += 2) {}", "for (int i = 0; ::mslc::count_step(), i != n; i += 2) {}"),
        ("for (int i = t; i < n; i += s * 2) {}", "for (int i = t; i < n; i += ::mslc::stride(s * 2)) {}"),
        (
            "for (int i = t; i < n; i += A<int, B<int, 4>>::k, ++j) {}",
            "for (int i = t; i < n; i += ::mslc::stride(A<int, B<int, 4>>::k), ++j) {}",
        ),
    ],
)
def test_loops_that_may_not_end_count_steps(loop, expected):
    assert expected in body(f"void f() {{ {loop} }}")


BACK = "void back(int a, thread int& b) { b = 0; } int look(int a, const thread int& b) { return b; }"


@pytest.mark.parametrize(
    "loop",
    [
        "for (int i = 0; i < 3; ++i) { i = 0; }",
        "for (int i = 0; i < 3; ++i) i -= 1;",
        "for (int i = 0; i < 3; ++i) if (n) {} else { --i; }",
        "for (int i = 0; i < 3; ++i) { i >>= 1; }",
        "for (int i = 0; i < 3; ++i) { thread int& r = i; r = 0; }",
        "for (int i = 0; i < 3; ++i) { thread int* p = &i; *p = 0; }",
        "for (int i = 0; i < 3; ++i) back(1, i);",
        "auto g = [](thread int& x) { x = 0; }; for (int i = 0; i < 3; ++i) { g(i); }",
        "thread int& r = k; for (k = 0; k < 3; ++k) r = 0;",
        "auto g = [&]() { k = 0; }; for (k = 0; k < 3; ++k) g();",
        "for (int i = 0; i < n; ++i) ++n;",
        "for (int i = 0; i < n; ++i, ++n) {}",
        "for (int i = 0; i < s.n; ++i) { s.n += 1; }",
    ],
)
def test_loops_that_set_back_their_counter_count_steps(loop):
    assert "::mslc::count_step(), " in body(f"{BACK} void f() {{ {loop} }}")


@pytest.mark.parametrize(
    "loop",
    [
        "for (int i = 0; i < 3; ++i) { x[i] = i; k += i; }",
        "for (int i = 0; i < 3; ++i) back(i, k);",
        "for (int i = 0; i < 3; ++i) look(k, i);",
        "for (int i = 0; i < 3; ++i) { bool b = i == 3; k = n & i; }",
        "for (int i = 0; i < 3; ++i) {} k = 0;",
        "for (; k < 3; ++k) {}",
        "for (int i = n; i != 0; i >>= 1) {}",
        "for (int i = 0; i < 3; ++i) {}",
        "for (int i = n - 1; i >= 0; i--) {}",
        "for (short i = 16; i > 0; i >>= 1) {}",
        "for (uint i = 1; b && 32 > i; i <<= 1) {}",
        "for (int i = 0, j = 0; i < n; ++i, ++j) {}",
        "for (auto& x : y) {}",
    ],
)
def test_counted_loops_stay_as_they_are(loop):
    assert loop in body(f"{BACK} void f() {{ {loop} }}")


def test_kernels_know_which_constants_they_miss():
    source = """
constant bool used [[function_constant(0)]];
constant bool in_helper [[function_constant(1)]];
constant bool optional [[function_constant(2)]];
constant bool derived = is_function_constant_defined(optional) ? optional : in_helper;
constant bool binds [[function_constant(3)]];
template <typename T> struct Tile { static T load() { return in_helper; } };
namespace deep { template <typename T> T helper() { return Tile<T>::load(); } }
kernel void first() { if (used) return; }
template <typename T> [[kernel]] void second(device T* x [[buffer(0), function_constant(binds)]]) { deep::helper<T>(); }
template [[host_name("second")]] [[kernel]] decltype(second<int>) second<int>;
kernel void third() { if (derived) return; }
kernel void fourth() {}
"""

    def missing(**constants):
        return {k.name: k.missing_constants for k in rewrite(source, constants).module.kernels if k.missing_constants}

    assert missing() == {"first": ["used"], "second": ["binds", "in_helper"], "third": ["in_helper"]}
    assert missing(used=True, in_helper=False) == {"second": ["binds"]}
    assert not missing(used=True, in_helper=False, binds=False)

"""Metal that Apple's compiler refuses or understands differently, each with a similar twin that it accepts. `@` marks
the place that the finding must name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    name: str
    refused: str
    accepted: str
    message: str  # a part of the finding's

    @property
    def source(self) -> str:
        return self.refused.replace("@", "")

    @property
    def place(self) -> tuple[int, int]:
        """(line, column), from 1."""
        before = self.refused[: self.refused.index("@")]
        return before.count("\n") + 1, len(before) - before.rfind("\n")


HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def in_body(name: str, refused: str, accepted: str, message: str, before: str = "") -> Refused:
    """Statements of a kernel that has `x`, a pointer to float in device memory, and `i`."""
    text = HEAD + before + "kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {\n  "
    return Refused(name, f"{text}{refused}\n}}\n", f"{text}{accepted}\n}}\n", message)


def in_file(name: str, refused: str, accepted: str, message: str) -> Refused:
    return Refused(name, f"{HEAD}{refused}\n", f"{HEAD}{accepted}\n", message)


def parameter(name: str, refused: str, accepted: str, message: str) -> Refused:
    """A parameter of a kernel beside `x`."""
    text = "kernel void k(device float* x [[buffer(0)]], {}) {{ x[0] = 1; }}"
    return in_file(name, text.format(refused), text.format(accepted), message)


STRUCT = "struct S { float a; float b; };\n"
MEMBER = "struct S { float a; float f() const { return a; } };\n"
CONSTANT_MEMBER = "struct S { float a; float f() const constant { return a; } };\n"

# What reaches the host, or goes where no check looks. Not only `check` refuses it: nothing of the kind is ever run.
HOST = [
    in_file(
        "function of the host",
        '@extern "C" int system(constant char*);',
        "int system(constant char*);",
        "cannot call functions of the host",
    ),
    in_file("block of another language", '@extern "C" { int getpid(); }', "int getpid();", "of another language"),
    in_body(
        "function that is only declared",
        "x[i] = @getpid(1);",
        "x[i] = 1;",
        "'getpid' is not defined",
        "int getpid(int);\n",
    ),
    in_body(
        "member that is only declared",
        "S s; s.a = 1; x[i] = s.@f();",
        "S s; s.a = 1; x[i] = s.a;",
        "'S::f' is not defined",
        "struct S { float f() const; float a; };\n",
    ),
    in_body(
        "template that is only declared",
        "x[i] = @twice(x[i]);",
        "x[i] = 2 * x[i];",
        "'twice' is not defined",
        "template <typename T> T twice(T a);\n",
    ),
    in_body(
        "variable of the host",
        "x[i] = @environ;",
        "x[i] = 0;",
        "'environ' is not defined",
        "extern constant int environ;\n",
    ),
    in_file("name for the linker", 'int f(int) @asm("getpid");', "int f(int);", "'asm': Metal does not have it"),
    in_body("assembly", '@__asm__ volatile("nop");', "x[i] = 0;", "Metal does not have it"),
    in_body("library function of the compiler", '@__builtin_printf("hello");', "x[i] = 0;", "'printf' is not defined"),
    in_body(
        "instruction of the host", "x[i] = @__builtin_ia32_rdtsc();", "x[i] = 0;", "depends on the host's processor"
    ),
    in_file(
        "function that runs when it is loaded",
        "__attribute__((@constructor)) void f() {}",
        "__attribute__((always_inline)) inline void f() {}",
        "attribute 'constructor' is for the host's",
    ),
    in_file("weak symbol", "[[gnu::@weak]] void f();", "void f();", "attribute 'weak' is for the host's"),
    in_file(
        "constructor of a variable",
        "struct A { int a; A() : a(f()) {} static int f(); };\nint A::f() { return 1; }\nconstant A @a = A();",
        "struct A { int a; };\nconstant A a = {1};",
        "and cannot have a constructor",
    ),
    in_file("variable of a thread of the host", "@thread_local int n = 1;", "constant int n = 1;", "'thread_local'"),
    in_body("function of the runtime", "@mslc_step();", "x[i] = 0;", "is reserved for mslc"),
    in_body("goto", "@goto end; end: x[i] = 0;", "x[i] = 0;", "does not have it"),
]

CATALOGUE = [
    *HOST,
    # ---- words of Metal
    in_body(
        "qualified cast", "x[i] = metal::@as_type<float>(i);", "x[i] = as_type<float>(i);", "'as_type' is a keyword"
    ),
    in_body(
        "qualified address space", "metal::@device float* p = x; *p = 0;", "device float* p = x; *p = 0;", "keyword"
    ),
    in_body(
        "cast operator as a name", "int @as_type = 1; x[i] = as_type;", "int bits = 1; x[i] = bits;", "cast operator"
    ),
    in_body("vertex as a name", "float @vertex = 1; x[i] = vertex;", "float v = 1; x[i] = v;", "is a Metal keyword"),
    in_body("kernel as a name", "float @kernel = 1; x[i] = 0;", "float k1 = 1; x[i] = k1;", "is a Metal keyword"),
    in_body("half as a name", "float @half = 1; x[i] = 0;", "half h = 1; x[i] = h;", "is a Metal type"),
    # ---- structs, their assignments and members
    in_body(
        "braced assignment", "S s; @s = {1, 2}; x[i] = s.a;", "S s; s = S{1, 2}; x[i] = s.a;", "braced list", STRUCT
    ),
    Refused(
        "member without an address space, called on constant memory",
        HEAD
        + MEMBER
        + "kernel void k(device float* x [[buffer(0)]], constant S& s [[buffer(1)]]) { x[0] = @s.f(); }\n",
        HEAD
        + CONSTANT_MEMBER
        + "kernel void k(device float* x [[buffer(0)]], constant S& s [[buffer(1)]]) { x[0] = s.f(); }\n",
        "cannot initialize object parameter",
    ),
    in_file("virtual member", "struct S { @virtual void f() {} };", "struct S { void f() {} };", "no run-time types"),
    # ---- pointers and address spaces
    in_body(
        "cast to another address space",
        "threadgroup float* t = (threadgroup float*)@x; *t = 0;",
        "device float* t = (device float*)x; *t = 0;",
        "cannot change the address space",
    ),
    in_body(
        "reinterpret_cast to another address space",
        "constant float* t = reinterpret_cast<constant float*>@(x); x[i] = *t;",
        "device float* t = reinterpret_cast<device float*>(x); x[i] = *t;",
        "cannot change the address space",
    ),
    in_body(
        "pointer to another address space",
        "threadgroup float* @t = x; *t = 0;",
        "device float* t = x; *t = 0;",
        "cannot initialize",
    ),
    in_body(
        "pointer without an address space",
        "@float* p = nullptr; x[i] = p != nullptr;",
        "device float* p = nullptr; x[i] = p != nullptr;",
        "needs an address space for 'float'",
    ),
    in_file(
        "reference without an address space",
        "inline void f(@float& a) { a = 1; }",
        "inline void f(thread float& a) { a = 1; }",
        "needs an address space for 'float'",
    ),
    in_body(
        "pointer to a function",
        "float @(*f)(float) = nullptr; x[i] = f != nullptr;",
        "x[i] = 0;",
        "pointer to a function",
    ),
    in_body(
        "vector access to an unaligned array",
        "threadgroup half t[64]; threadgroup uint4* v = reinterpret_cast<threadgroup uint4*>(@t); v[0] = i; x[i] = t[i];",
        "alignas(16) threadgroup half t[64]; threadgroup uint4* v = reinterpret_cast<threadgroup uint4*>(t); v[0] = i;"
        " x[i] = t[i];",
        "promises 2 bytes of alignment, uint4 needs 16",
    ),
    in_body(
        "vector access to an unaligned array, C cast",
        "float t[4] = {}; x[i] = ((thread float4*)@t)->x;",
        "alignas(16) float t[4] = {}; x[i] = ((thread float4*)t)->x;",
        "promises 4 bytes of alignment",
    ),
    # ---- variables
    in_file(
        "program-scope array", "@float table[2] = {1, 2};", "constant float table[2] = {1, 2};", "must be 'constant'"
    ),
    in_file(
        "program-scope const array",
        "@const float table[2] = {1, 2};",
        "constant const float table[2] = {1, 2};",
        "must be 'constant'",
    ),
    in_body("static variable", "@static int n = 0; x[i] = n;", "constexpr int n = 0; x[i] = n;", "must be 'constant'"),
    in_body(
        "threadgroup variable with an initialiser",
        "threadgroup float t[4] @= {}; x[i] = t[0];",
        "threadgroup float t[4]; t[0] = 1; x[i] = t[0];",
        "cannot have an initialiser",
    ),
    in_file(
        "threadgroup variable outside a kernel",
        "inline float f() { @threadgroup float t; t = 1; return t; }",
        "inline float f() { float t = 1; return t; }",
        "is declared outside a kernel",
    ),
    in_file(
        "too much threadgroup memory",
        "@kernel void k(device float* x [[buffer(0)]]) { threadgroup float t[8193]; t[0] = 1; x[0] = t[0]; }",
        "kernel void k(device float* x [[buffer(0)]]) { threadgroup float t[8192]; t[0] = 1; x[0] = t[0]; }",
        "uses 32784 bytes of threadgroup memory; the limit is 32768",
    ),
    # ---- function constants
    in_file(
        "function constant with an initialiser",
        "constant bool c [[function_constant(0)]] @= true;",
        "constant bool c [[function_constant(0)]];",
        "cannot have an initialiser",
    ),
    in_file(
        "function constant that is not constant",
        "@const bool c [[function_constant(0)]];",
        "constant bool c [[function_constant(0)]];",
        "must be 'constant'",
    ),
    in_body(
        "function constant in a function",
        "constant bool c [[@function_constant(0)]]; x[i] = c;",
        "x[i] = c;",
        "outside functions",
        "constant bool c [[function_constant(1)]];\n",
    ),
    in_file(
        "function constant twice",
        "constant bool a [[function_constant(3)]];\nconstant bool b [[@function_constant(3)]];",
        "constant bool a [[function_constant(3)]];\nconstant bool b [[function_constant(4)]];",
        "declared twice",
    ),
    in_file(
        "function constant out of range",
        "constant bool a [[function_constant(@65536)]];",
        "constant bool a [[function_constant(65535)]];",
        "the last function constant is 65535",
    ),
    # ---- kernels and their parameters
    parameter(
        "value that is bound", "uint n [[@buffer(1)]]", "constant uint& n [[buffer(1)]]", "pointer or a reference"
    ),
    parameter(
        "buffer in thread memory",
        "thread float* n [[@buffer(1)]]",
        "device float* n [[buffer(1)]]",
        "must point to device or constant memory",
    ),
    parameter(
        "threadgroup pointer as a buffer",
        "threadgroup float* n [[@buffer(1)]]",
        "threadgroup float* n [[threadgroup(0)]]",
        "must point to device or constant memory",
    ),
    parameter(
        "thread position of float",
        "float n [[@thread_position_in_grid]]",
        "uint n [[thread_position_in_grid]]",
        "is ushort or uint",
    ),
    parameter(
        "SIMD lane of a vector",
        "uint2 n [[@thread_index_in_simdgroup]]",
        "uint n [[thread_index_in_simdgroup]]",
        "is ushort or uint, not uint2",
    ),
    in_file(
        "too many threads",
        "[[max_total_threads_per_threadgroup(@2048)]] kernel void k(device float* x [[buffer(0)]]) {}",
        "[[max_total_threads_per_threadgroup(1024)]] kernel void k(device float* x [[buffer(0)]]) {}",
        "a threadgroup has 1 to 1024 threads",
    ),
    in_body(
        "call of a kernel",
        "@other(x);",
        "x[i] = 0;",
        "kernels are launched, not called",
        "kernel void other(device float* x [[buffer(0)]]) { x[0] = 1; }\n",
    ),
    # ---- C++ that Metal leaves out
    in_body("double", "@double d = 1; x[i] = d;", "float d = 1; x[i] = d;", "does not have this type"),
    in_body("long long", "@long long d = 1; x[i] = d;", "long d = 1; x[i] = d;", "long has 64 bits"),
    in_body("long long literal", "x[i] = @1ll;", "x[i] = 1l;", "long has 64 bits"),
    in_body("heap", "x[i] = *@new float(1);", "x[i] = float(1);", "no heap"),
    in_body("exception", "@throw 1;", "return;", "no exceptions"),
    in_file(
        "variable number of arguments",
        "inline void f(int a, @...) {}",
        "inline void f(int a, int b) {}",
        "variable number of arguments",
    ),
    in_body("std", "x[i] = @std::max(1, 2);", "x[i] = max(1, 2);", "namespace metal"),
    in_body(
        "structured binding",
        "auto @[a, b] = S{1, 2}; x[i] = a + b;",
        "S s = S{1, 2}; x[i] = s.a + s.b;",
        "structured binding",
        STRUCT,
    ),
    # ---- spellings that nobody has seen compiled
    in_body("unknown name", "x[i] = @metal::no_such_function(1.0f);", "x[i] = metal::sin(1.0f);", "no_such_function"),
    in_file(
        "unknown attribute",
        "[[@made_up]] kernel void k(device float* x [[buffer(0)]]) {}",
        "[[kernel]] void k(device float* x [[buffer(0)]]) {}",
        "'[[made_up]]' occurs in no Metal source",
    ),
    in_file(
        "unknown pragma", "@#pragma whatever", "#pragma METAL internals : enable", "'#pragma whatever' occurs in no"
    ),
    in_body(
        "internal of another compiler",
        "x[i] = @__builtin_popcount(i);",
        "x[i] = popcount(i);",
        "occurs in no Metal source",
    ),
]

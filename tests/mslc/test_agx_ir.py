"""LLVM code that mslc rewrites before Mesa's compiler for Apple GPUs, executed here beside the original."""

import ctypes
import re

import numpy as np
import pytest

from mlx_anvil.mslc.agx_bfloat import without_bfloat
from mlx_anvil.mslc.agx_spirv import without_reversals, without_single_vectors
from mlx_anvil.mslc.toolchain import link_shared, require, run_tool

# ---- bfloat --------------------------------------------------------------------------------------------------------

BFLOAT = """
typedef __bf16 bfloat;
typedef bfloat bfloat4 __attribute__((ext_vector_type(4)));
#define EXPORT extern "C" __attribute__((visibility("default")))
#define BINARY(name, expression) \\
  EXPORT void name(const bfloat* a, const bfloat* b, bfloat* o, long n) { \\
    for (long i = 0; i < n; ++i) { const bfloat x = a[i], y = b[i]; o[i] = expression; } \\
  }
BINARY(add, x + y)
BINARY(subtract, x - y * bfloat(3.0f))
BINARY(divide, x / y)
BINARY(negate, -x)
BINARY(larger, x < y ? y : x)
BINARY(of_whole, bfloat(int(float(x) * 1000)) + bfloat(unsigned(7)))
BINARY(to_whole, bfloat(float(int(x * bfloat(64))) + 0.25f))
BINARY(size, __builtin_elementwise_abs(x))
EXPORT void vectors(const bfloat4* a, const bfloat4* b, bfloat4* o, long n) {
  const bfloat4 two = {2.0f, 3.0f, 4.0f, 5.0f};
  for (long i = 0; i < n / 4; ++i) o[i] = a[i] * b[i] + two;
}
"""
BFLOAT_FUNCTIONS = [*re.findall(r"BINARY\((\w+),", BFLOAT)[1:], "vectors"]


@pytest.fixture(scope="module")
def bfloat_libraries(tmp_path_factory):
    """The same functions for this machine: by the compiler's own bfloat, and with the type replaced."""
    folder = tmp_path_factory.mktemp("arithmetic")
    source, code, replaced = (folder / name for name in ("functions.cpp", "functions.ll", "replaced.ll"))
    source.write_text(BFLOAT)
    exact = ["-Xclang", "-fbfloat16-excess-precision=none", "-ffp-contract=off", "-fno-strict-float-cast-overflow"]
    flags = ["clang", "-x", "c++", "-O1", *exact, "-fPIC", "-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm"]
    require(run_tool([*flags, str(source), "-o", str(code)]), "compiling")
    text = without_bfloat(code.read_text())
    assert "bfloat" in code.read_text()
    assert "bfloat" not in text
    replaced.write_text(text)
    libraries = []
    for path in (code, replaced):
        compiled, library = path.with_suffix(".o"), path.with_suffix(".so")
        require(run_tool(["clang", "-x", "ir", "-O1", "-fPIC", "-c", str(path), "-o", str(compiled)]), "compiling")
        builtins = folder / "builtins.o"
        (folder / "builtins.c").write_text(TRUNCATION)
        require(run_tool(["clang", "-O1", "-fPIC", "-c", str(folder / "builtins.c"), "-o", str(builtins)]), "compiling")
        link_shared([str(compiled), str(builtins)], library)
        libraries.append(ctypes.CDLL(str(library)))
    return libraries


# What the compiler calls to round to bfloat, of a library that is not linked here.
TRUNCATION = """
__bf16 __truncsfbf2(float x) {
  unsigned bits;
  __builtin_memcpy(&bits, &x, 4);
  bits = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  unsigned short high = bits >> 16;
  __bf16 result;
  __builtin_memcpy(&result, &high, 2);
  return result;
}
"""


@pytest.mark.parametrize("name", BFLOAT_FUNCTIONS)
def test_arithmetic_without_bfloat(rng, bfloat_libraries, name):
    a, b = (rng.integers(0, 1 << 16, 4096, np.uint16) for _ in range(2))
    if name in ("of_whole", "to_whole"):
        a = (rng.standard_normal(4096).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    results = []
    for library in bfloat_libraries:
        out = np.zeros_like(a)
        getattr(library, name)(*(ctypes.c_void_p(x.ctypes.data) for x in (a, b, out)), ctypes.c_long(len(a)))
        results.append((out.astype(np.uint32) << 16).view(np.float32))
    np.testing.assert_array_equal(*results)
    assert len(np.unique(results[0])) > 5


def test_names_and_texts_that_say_bfloat_are_left_alone():
    code = """@.str = private constant [14 x i8] c"void f(bfloat)"
define void @bfloat(ptr %bfloat.x, bfloat %y) {
  store bfloat %y, ptr %bfloat.x, align 2, !tbaa !1
}
"""
    expected = code.replace("bfloat %y", "i16 %y").replace(", !tbaa !1", "")
    assert without_bfloat(code).split("\ndefine internal")[0].rstrip() == expected.rstrip()


def test_code_that_has_no_bfloat_is_left_alone():
    assert without_bfloat("define void @f() {\n  ret void\n}\n") == "define void @f() {\n  ret void\n}\n"


# ---- bits in reverse order -----------------------------------------------------------------------------------------


def test_bits_in_reverse_order(tmp_path):
    source, compiled, library = (tmp_path / name for name in ("bits.ll", "bits.o", "bits.so"))
    text = """define i8 @reversed(i8 %x) {
  %1 = trunc i8 %x to i3
  %2 = tail call i3 @llvm.bitreverse.i3(i3 %1) #0
  %3 = zext i3 %2 to i8
  ret i8 %3
}
"""
    source.write_text(without_reversals(text))
    assert "bitreverse" not in source.read_text()
    require(run_tool(["clang", "-x", "ir", "-O1", "-fPIC", "-c", str(source), "-o", str(compiled)]), "compiling")
    link_shared([str(compiled)], library)
    function = ctypes.CDLL(str(library)).reversed
    assert [function(x) for x in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]


# ---- vectors of one element ----------------------------------------------------------------------------------------


def test_vectors_of_one_element(tmp_path):
    text = """define void @spread(ptr %from, ptr %to) {
  %1 = load <1 x float>, ptr %from, align 4
  %2 = shufflevector <1 x float> %1, <1 x float> poison, <2 x i32> zeroinitializer
  store <2 x float> %2, ptr %to, align 4
  %3 = extractelement <1 x float> %1, i64 0
  %4 = fadd float %3, 1.000000e+00
  %5 = insertelement <1 x float> poison, float %4, i64 0
  %6 = getelementptr float, ptr %to, i64 2
  store <1 x float> %5, ptr %6, align 4
  ret void
}
"""
    source, compiled, library = (tmp_path / name for name in ("single.ll", "single.o", "single.so"))
    source.write_text(without_single_vectors(text))
    assert "<1 x" not in source.read_text()
    require(run_tool(["clang", "-x", "ir", "-O1", "-fPIC", "-c", str(source), "-o", str(compiled)]), "compiling")
    link_shared([str(compiled)], library)
    given, results = np.float32([2.5]), np.zeros(3, np.float32)
    ctypes.CDLL(str(library)).spread(*(ctypes.c_void_p(x.ctypes.data) for x in (given, results)))
    assert results.tolist() == [2.5, 2.5, 3.5]
    assert without_single_vectors("<2 x float>") == "<2 x float>"

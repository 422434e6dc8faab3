"""Memory is aligned as its declaration promises and no better; checked mode reports an access that needs more."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_anvil.mslc import Library, SimulationError, metal_kernel
from mlx_anvil.mslc.compiler import CHECKED, PROFILED, UNCHECKED
from tests.mslc.msl import HEAD

ARGUMENTS = """const device half* x [[buffer(0)]], device uint4* o [[buffer(1)]], constant uint& two [[buffer(2)]],
    threadgroup half* passed [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]"""
HELPERS = """METAL_FUNC void store(threadgroup half* to, uint4 v) { *reinterpret_cast<threadgroup uint4*>(to) = v; }
METAL_FUNC uint4 load(const threadgroup half* from) { return *reinterpret_cast<const threadgroup uint4*>(from); }
struct Two { float a, b; };
struct Vectors { float4 a; float3 b; half2 c; };
"""
FIRST_LINE = len((HEAD + HELPERS + ARGUMENTS).split("\n"))  # of a body
VECTORS = "\nstore(tile + 8 * t, uint4(t));\no[t] = load(tile + 8 * t);"


def run(body, options=CHECKED, x=None, dtype=np.uint32):
    """Runs a body by 8 threads and returns o, the uint4 of each."""
    source = f"{HEAD}{HELPERS}kernel void k({ARGUMENTS}) {{{body}\n}}\n"
    x = np.arange(256, dtype=np.float16) if x is None else x
    o = np.zeros((8, 4), dtype)
    Library(source, options=options).run("k", {0: x, 1: o, 2: np.full(64, 2, np.uint32)}, (1,), (8,), [256])
    return o


def only(body, **settings):
    with pytest.raises(SimulationError) as caught:
        run(body, **settings)
    (finding,) = caught.value.findings
    assert finding.kind == "misaligned access"
    return finding


# ---- threadgroup memory


def test_vectors_in_an_array_of_halves_are_reported():
    found = only("\nthreadgroup half tile[64];" + VECTORS)
    column = HELPERS.index("= v") + 1
    assert (found.file, found.line, found.column) == ("kernel.metal", HEAD.count("\n") + 1, column)
    assert (found.size, found.offset) == (16, 256)  # behind what is passed
    assert found.message == (
        "write of type 'threadgroup uint4' at byte 0 of threadgroup memory 'tile', which is not aligned to 16 bytes"
    )


@pytest.mark.parametrize(
    "declaration",
    [
        "alignas(16) threadgroup half tile[64];",
        "alignas(uint4) threadgroup half tile[64];",
        "alignas(2) alignas(sizeof(float4)) threadgroup half tile[64];",
        "alignas(16) threadgroup half other[3], tile[64]; other[t % 2] = 0;",
        "threadgroup uint4 vectors[8]; threadgroup half* tile = (threadgroup half*)vectors;",
        "threadgroup half* tile = passed;",
    ],
)
@pytest.mark.parametrize("options", [CHECKED, UNCHECKED, PROFILED], ids=["checked", "unchecked", "profiled"])
def test_vectors_in_aligned_memory_are_not(declaration, options):
    o = run("\n" + declaration + VECTORS, options)
    np.testing.assert_array_equal(o, np.repeat(np.arange(8), 4).reshape(8, 4))


@pytest.mark.parametrize(
    ("declaration", "variable", "alignment"),
    [
        ("threadgroup uchar a[3];", "a", 1),
        ("threadgroup half a[64];", "a", 2),
        ("threadgroup float a[64];", "a", 4),
        ("threadgroup packed_float3 a[4];", "a", 4),
        ("threadgroup float3 a[4];", "a", 16),
        ("threadgroup Vectors a;", "(&a)", 16),
        ("threadgroup ulong4 a[4];", "a", 32),
        ("alignas(16) threadgroup half a[64];", "a", 16),
        ("alignas(8) alignas(64) threadgroup half a[64];", "a", 64),
        ("", "passed", 16),
    ],
)
@pytest.mark.parametrize("options", [CHECKED, UNCHECKED, PROFILED], ids=["checked", "unchecked", "profiled"])
def test_threadgroup_memory_is_aligned_as_declared_and_no_better(declaration, variable, alignment, options):
    body = (
        f"\nthreadgroup uchar before[5]; before[t % 2] = 0; {declaration} o[t] = reinterpret_cast<ulong>({variable});"
    )
    address = int(run(body, options)[0, 0])
    assert address & -address == alignment


def test_lengths_that_metal_refuses_are_refused():
    source = HEAD + "kernel void k(threadgroup uchar* s [[threadgroup(0)]]) { s[0] = 0; }"
    with pytest.raises(SimulationError, match=r"threadgroup memory 0 has a length of 24 bytes.*a multiple of 16"):
        Library(source).run("k", {}, (1,), (1,), [24])


# ---- buffers


def test_an_array_begins_where_a_buffer_may_begin():
    address = int(run("o[t] = uint(reinterpret_cast<ulong>(x));")[0, 0])
    assert address & -address == 256


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 24, 511])
def test_a_view_is_as_aligned_as_its_offset(offset):
    memory = np.zeros(2048, np.float16)
    view = memory[:1024][offset:]  # of a view: the offset counts from the array that owns the memory
    address = int(run("o[t] = uint(reinterpret_cast<ulong>(x));", x=view)[0, 0])
    assert address % 256 == 2 * offset % 256


def test_vectors_in_a_view_are_reported():
    body = "\no[t] = *reinterpret_cast<const device uint4*>(x + 8 * t);"
    memory = np.arange(257, dtype=np.float16)
    found = only(body, x=memory[1:])
    assert (found.line, found.column, found.size, found.buffer) == (FIRST_LINE + 1, 8, 16, 0)
    assert "read of type 'const device uint4' at byte 0 of buffer 'x'" in found.message
    np.testing.assert_array_equal(run(body, x=memory[8:]).view(np.float16).ravel(), memory[8:72])
    np.testing.assert_array_equal(run(body, UNCHECKED, x=memory[1:]).view(np.float16).ravel(), memory[1:65])


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("*reinterpret_cast<const device uint4*>(x + 4 * t)", "'const device uint4' at byte 8 of buffer 'x'"),
        ("reinterpret_cast<const device uint4*>(x + 4 * t)->y", "at byte 8 of buffer 'x'"),
        ("uint(reinterpret_cast<const device ulong4*>(x + 8 * t)->z)", "a vector that is not aligned"),
        ("uint((*reinterpret_cast<const device float3*>(x + 6 * t)).z)", "a vector that is not aligned"),
        ("uint(float3(*reinterpret_cast<const device packed_float3*>(x + 3 * t)).z)", "'packed_float3' at byte 6"),
        ("uint(reinterpret_cast<const device Two*>(x + t)->b)", "'const device Two' at byte 2 of buffer 'x'"),
        ("uint(Two(*reinterpret_cast<const device Two*>(x + t)).b)", "read of 4 bytes at byte 6 of buffer 'x'"),
        ("uint(reinterpret_cast<const device Vectors*>(x + 32 * t + 4)->c.x)", "'const device Vectors' at byte 8"),
        ("*reinterpret_cast<constant uint4*>(&two + t)", "at byte 4 of buffer 'two'"),
    ],
)
def test_types_that_need_more(expression, words):
    found = only(f"\no[t] = {expression};")
    assert words in found.message
    assert found.line == FIRST_LINE + 1
    run(f"\no[t] = {expression};", UNCHECKED)  # does not end the process


@pytest.mark.parametrize(
    "expression",
    [
        "uint(float3(*reinterpret_cast<const device packed_float3*>(x + 6 * t)).z)",
        "uint(float4(*reinterpret_cast<const device packed_float4*>(x + 2 * t)).z)",
        "uint(half3(*reinterpret_cast<const device packed_half3*>(x + 3 * t)).z)",
        "uint(Two(*reinterpret_cast<const device Two*>(x + 2 * t)).b)",
        "uint(reinterpret_cast<const device Vectors*>(x + 8 * t)->c.x)",
        "uint(reinterpret_cast<const device half4*>(x + 4 * t)->w)",
    ],
)
def test_types_that_need_no_more(expression):
    run(f"\no[t] = {expression};")


@pytest.mark.parametrize(("first", "is_aligned"), [(0, True), (1, False), (2, False), (4, True)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_inputs_of_a_custom_kernel_are_as_aligned_as_the_view(first, is_aligned, dtype):
    first = first * 4 // dtype.size
    source = (
        "uint i = thread_position_in_grid.x; b[i] = as_type<float4>(*(const device uint4*)(a + i * 16 / sizeof(T)));"
    )
    kernel = metal_kernel("k", ["a"], ["b"], source.replace("b[i]", "((device float4*)b)[i]"), checked=True)
    a = mx.arange(64, dtype=mx.float32).astype(dtype)[first:]
    call = partial(kernel, inputs=[a], template=[("T", dtype)], grid=(4, 1, 1), threadgroup=(4, 1, 1))
    call = partial(call, output_shapes=[(16,)], output_dtypes=[mx.float32])
    if is_aligned:
        expected = mx.contiguous(a).view(mx.float32)[:16]
        assert mx.array_equal(call()[0], expected)
        return
    with pytest.raises(SimulationError, match=r"read of type 'const device uint4' at byte 0 of buffer 'a'"):
        call()


# ---- memory of a thread


def test_a_pointer_into_a_threads_array():
    prelude = "half a[13] = {x[t]};\nthread half* p = a + two - 1;\n"
    body = prelude + "o[t] = uint(half4(*reinterpret_cast<thread half4*>(p + t)).x);"
    assert "a variable of the thread" in only(body).message


# ---- a misaligned access does not end the process


@pytest.mark.parametrize(
    "body",
    [
        "threadgroup half tile[64];" + VECTORS,
        "threadgroup half space[80]; threadgroup half* tile = space + 1;" + VECTORS,
        """threadgroup half a[80]; auto v = reinterpret_cast<threadgroup float4*>(a + 1);
           v[t] = float4(t); v[t] *= v[t]; v[t] = fma(v[t], v[t], v[t]); o[t] = uint4(v[t]);""",
        """threadgroup uchar a[512]; auto v = reinterpret_cast<threadgroup ulong4*>(a + 1);
           v[t] = ulong4(t); v[t] += v[t]; o[t] = uint4(v[t]);""",
        """threadgroup uchar a[512]; auto v = reinterpret_cast<threadgroup Vectors*>(a + 1);
           v[t] = Vectors{float4(t), float3(t), half2(t)}; Vectors c = v[t]; o[t] = uint4(c.a);""",
    ],
)
def test_unchecked_runs_survive(body):
    o = run(body, UNCHECKED)
    assert o[1:].all()
    only(body)

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest

from mlx_anvil.mslc import Library, SimulationError, Source, ToolchainError, compiler, toolchain
from mlx_anvil.mslc.compiler import CHECKED, UNCHECKED
from mlx_anvil.mslc.static_memory import static_threadgroup_memory
from tests.mslc.msl import HEAD, METAL_TYPES, library

POSITIONS = """
kernel void positions(device uint* o [[buffer(0)]],
    uint3 in_grid [[thread_position_in_grid]], ushort3 in_group [[thread_position_in_threadgroup]],
    uint3 group [[threadgroup_position_in_grid]], uint3 size [[threads_per_threadgroup]],
    uint3 full [[dispatch_threads_per_threadgroup]], uint3 grid [[threads_per_grid]],
    uint3 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simds [[simdgroups_per_threadgroup]], uint width [[threads_per_simdgroup]],
    uint quad [[quadgroup_index_in_threadgroup]], uint in_quad [[thread_index_in_quadgroup]]) {
  device uint* r = o + 25 * ((in_grid.z * grid.y + in_grid.y) * grid.x + in_grid.x);
  uint values[] = {in_grid.x, in_grid.y, in_grid.z, in_group.x, in_group.y, in_group.z, group.x, group.y, group.z,
                   size.x, size.y, size.z, full.x, full.y, full.z, groups.x, groups.y, groups.z, index, simd, lane,
                   simds, width, quad, in_quad};
  for (int i = 0; i < 25; ++i) r[i] = values[i];
}
"""


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("dispatch", ["threads", "threadgroups"])
def test_positions_in_three_dimensions(dispatch, seed):
    tg = np.array([5, 3, 4])
    groups = np.array([3, 2, 2])
    grid = np.array([13, 5, 7]) if dispatch == "threads" else groups * tg
    out = np.full((grid[2], grid[1], grid[0], 25), 0xFFFFFFFF, np.uint32)
    launch = grid if dispatch == "threads" else groups
    report = library(POSITIONS).run("positions", {0: out}, launch.tolist(), tg.tolist(), dispatch=dispatch, seed=seed)
    assert report.threadgroups == groups.prod()
    z, y, x = np.indices(out.shape[:3])
    position = np.stack([x, y, z], -1)
    group = position // tg
    inside = position - group * tg
    size = np.minimum(tg, grid - group * tg)
    index = (inside[..., 2] * size[..., 1] + inside[..., 1]) * size[..., 0] + inside[..., 0]
    threads = size.prod(-1)
    expected = np.concatenate(
        [position, inside, group, size, np.broadcast_to(tg, size.shape), np.broadcast_to(groups, size.shape)]
        + [
            v[..., None]
            for v in (index, index // 32, index % 32, -(-threads // 32), 0 * index + 32, index // 4, index % 4)
        ],
        -1,
    )
    np.testing.assert_array_equal(out, expected)


REVERSE = """
kernel void reverse(const device float* x [[buffer(0)]], device float* o [[buffer(1)]],
    threadgroup float* shared [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]], uint n [[threads_per_threadgroup]]) {
  threadgroup float copy[1024];
  shared[t] = x[g * n + t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  copy[t] = shared[n - 1 - t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[g * n + t] = copy[(t + 1) % n];
}
"""


@pytest.mark.parametrize("seed", [0, 1, 99])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 31, 32, 100, 1024])
def test_threadgroup_memory_and_barriers(rng, size, threads, seed):
    x = rng.standard_normal((9, size)).astype(np.float32)
    out = np.zeros_like(x)
    length = -(-4 * size // 16) * 16
    report = library(REVERSE).run("reverse", {0: x, 1: out}, (9,), (size,), [length], seed=seed, threads=threads)
    np.testing.assert_array_equal(out, np.roll(x[:, ::-1], -1, 1))
    assert report.barriers == 18
    assert report.threadgroup_memory == length + 4096


def test_unwritten_threadgroup_memory_is_poisoned():
    source = "kernel void k(device float* o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) "
    source += "{ threadgroup float s[4]; o[t] = s[t]; s[t] = 1; }"
    out = np.zeros((2, 4), np.float32)
    library(source).run("k", {0: out}, (2,), (4,), threads=1)
    assert np.isnan(out[0]).all()


@pytest.mark.parametrize(
    ("condition", "words"), [("t < 40", "returned"), ("t % 2 == 0", "thread 0 waits at line 6, thread 1 at line 7")]
)
def test_barrier_divergence_is_stopped_with_a_place(condition, words):
    other = "" if condition.startswith("t <") else "else\n    threadgroup_barrier(mem_flags::mem_none);"
    source = f"""kernel void k(device float* o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {{
  o[t] = 1;
  if ({condition})
    threadgroup_barrier(mem_flags::mem_none);
  {other}
}}
"""
    source = source.replace("\n  else\n", "\n  else")
    with pytest.raises(SimulationError, match=words.replace("line 7", "line [78]")) as error:
        library(source).run("k", {0: np.zeros(64, np.float32)}, (1,), (64,))
    (finding,) = error.value.findings
    assert finding.kind == "barrier divergence"
    assert (finding.line, finding.column) == (6, 5)


@pytest.mark.parametrize(
    "loop",
    [
        "while (o[0] == 0) {}",
        "for (;;) { if (o[0] != 0) break; }",
        "do { simd_sum(t); } while (o[0] == 0);",
        "int v; while ((v = o[0]) == 0) {}",
        "while (int v = 1 - o[0]) { if (v == 7) break; }",
        "for (uint i = 3; i >= 0; --i) { if (o[0] != 0) break; }",
        "for (uint i = t; i < 64; i += 32 * o[0]) {}",
    ],
)
def test_a_kernel_that_never_ends_is_stopped(loop):
    source = f"kernel void k(volatile device int* o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {{ {loop} }}"
    out = np.zeros(1, np.int32)
    with pytest.raises(SimulationError, match="does not seem to end") as error:
        library(source).run("k", {0: out}, (1,), (32,), step_limit=10_000)
    assert error.value.findings[0].kind == "step limit"
    out[0] = 1
    library(source).run("k", {0: out}, (1,), (32,), step_limit=10_000)  # a failure poisons no later run


def test_limits_of_the_machine_are_enforced():
    source = "kernel void k(device int* o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) "
    source += "{ threadgroup int big[9000]; big[t] = t; o[t] = big[t]; }"
    out = np.zeros(32, np.int32)
    with pytest.raises(SimulationError, match="threadgroup memory exceeds 32768 bytes"):
        library(source).run("k", {0: out}, (1,), (32,))
    small = library("[[kernel, max_total_threads_per_threadgroup(64)]] void k(device int* o [[buffer(0)]]) {}")
    assert small.max_threads("k") == 64
    with pytest.raises(SimulationError, match="declares at most 64"):
        small.run("k", {0: out}, (1,), (65,))
    with pytest.raises(SimulationError, match="the limit is 1024"):
        library(REVERSE).run("reverse", {0: out, 1: out}, (1,), (1025,), [16])
    with pytest.raises(ValueError, match="needs a length for threadgroup memory 0"):
        library(REVERSE).run("reverse", {0: out, 1: out}, (1,), (32,))
    with pytest.raises(ValueError, match=r"needs buffer 1 \('o'\)"):
        library(REVERSE).run("reverse", {0: out}, (1,), (32,), [16])


def test_lanes_that_branch_apart_join_again(rng):
    source = """kernel void k(const device int* x [[buffer(0)]], device int* o [[buffer(1)]], uint t [[thread_index_in_simdgroup]]) {
  int v = x[t], r = 0;
  for (int i = 0; i < v; ++i) r += simd_sum(1);
  if (t < 10) r += 1000 * simd_sum(1);
  else r += 1000 * simd_sum(2);
  o[t] = r + 1000000 * simd_sum(1);
}"""
    for seed in (0, 3, 4):
        x = rng.integers(0, 6, 32).astype(np.int32)
        out = np.zeros(32, np.int32)
        report = library(source).run("k", {0: x, 1: out}, (1,), (32,), seed=seed)
        loop = np.array([sum((x > i).sum() for i in range(v)) for v in x])
        branch = np.where(np.arange(32) < 10, 10, 44) * 1000
        np.testing.assert_array_equal(out, loop + branch + 32_000_000)
        assert report.divergent_collectives >= 2


def test_concurrent_launches_do_not_disturb_each_other(rng):
    from concurrent.futures import ThreadPoolExecutor

    x = rng.standard_normal((9, 96)).astype(np.float32)

    def launch(i):
        out = np.zeros_like(x)
        library(REVERSE).run("reverse", {0: x, 1: out}, (9,), (96,), [384], seed=i, threads=2)
        return out

    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(launch, range(24)):
            np.testing.assert_array_equal(out, np.roll(x[:, ::-1], -1, 1))


def test_cache_notices_changed_headers_and_is_quick(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_ANVIL_CACHE", str(tmp_path / "cache"))
    header, main = tmp_path / "v.h", tmp_path / "k.metal"
    main.write_text(HEAD + '#include "v.h"\nkernel void k(device int* o [[buffer(0)]]) { *o = VALUE; }\n')
    for value in (1, 2, 1):
        header.write_text(f"#define VALUE {value}\n")
        out = np.zeros(1, np.int32)
        Library(main).run("k", {0: out}, (1,), (1,))
        assert out[0] == value
    start = time.perf_counter()
    Library(main)
    assert time.perf_counter() - start < 0.02


def test_a_compilation_without_end_is_repeated_with_less_optimization(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_ANVIL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "LONGEST_COMPILATION", 0.001)
    monkeypatch.setattr(compiler, "run_tool", recorded := Mock(wraps=toolchain.run_tool))
    out = np.zeros(1, np.int32)
    Library(HEAD + "kernel void k(device int* o [[buffer(0)]]) { *o = 3; }").run("k", {0: out}, (1,), (1,))
    assert out[0] == 3
    assert ["-O1" in call.args[0] for call in recorded.call_args_list] == [False, True]


def test_constants_select_code():
    source = HEAD + "constant int n [[function_constant(2)]]; kernel void k(device int* o [[buffer(0)]]) { *o = n; }"
    for constants, expected in (({2: 5}, 5), ({"n": -7}, -7)):
        out = np.zeros(1, np.int32)
        Library(source, constants=constants).run("k", {0: out}, (1,), (1,))
        assert out[0] == expected


def test_a_kernel_needs_its_function_constants():
    source = HEAD + "constant int n [[function_constant(2)]]; constant bool b [[function_constant(3)]];"
    source += "constant int m = is_function_constant_defined(b) ? 1 : 0;"
    source += "kernel void k(device int* o [[buffer(0)]]) { *o = n; } kernel void other(device int* o) { *o = m; }"
    out = np.full(1, 7, np.int32)
    unspecialised = Library(source)
    with pytest.raises(ValueError, match=r"kernel 'k' needs a value for function constant 2 \('n'\)"):
        unspecialised.run("k", {0: out}, (1,), (1,))
    unspecialised.run("other", {0: out}, (1,), (1,))
    assert out[0] == 0
    Library(source, constants={"n": 5, 3: True}).run("k", {0: out}, (1,), (1,))
    assert out[0] == 5


def test_vectors_of_a_dependent_type_may_hold_bools():
    source = """template <typename T, int N> T sum(device T* x) {
  vec<T, N> v;
  for (int i = 0; i < N; ++i) v[i] = x[i];
  T total = 0;
  for (int i = 0; i < N; ++i) total = total || vec<T, N>(v)[i];
  return total + T(sizeof(v) != sizeof(T) * N);
}
kernel void k(device bool* x [[buffer(0)]], device half* h [[buffer(1)]], device int* o [[buffer(2)]]) {
  o[0] = sum<bool, 4>(x);
  o[1] = sum<half, 2>(h);
}"""
    out = np.zeros(2, np.int32)
    library(source).run("k", {0: np.array([0, 0, 1, 0], bool), 1: np.zeros(2, np.float16), 2: out}, (1,), (1,))
    np.testing.assert_array_equal(out, [1, 0])


def test_casts_in_a_row_and_member_initialisers(rng):
    source = """struct Pair {
  half2 small; float2 big;
  Pair(float2 v) thread : small(v), big((float2)(half2)v) {}
};
kernel void k(const device float2* x [[buffer(0)]], device float4* o [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  Pair p(x[i]);
  o[i] = float4(-(float2)p.small, p.big);
}"""
    x = rng.standard_normal((32, 2)).astype(np.float32)
    out = np.zeros((32, 4), np.float32)
    library(source).run("k", {0: x, 1: out}, (1,), (32,))
    rounded = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out, np.concatenate([-rounded, rounded], -1))


def test_missing_compiler_names_the_extra(monkeypatch):
    toolchain.find_zig.cache_clear()
    monkeypatch.delenv("MLX_ANVIL_ZIG", raising=False)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(ToolchainError, match=r"pip install .*\[sim\]"):
        toolchain.find_zig()
    toolchain.find_zig.cache_clear()


def test_static_threadgroup_memory_of_instantiations():
    source = (
        HEAD
        + """
template <typename T, int N> [[kernel]] void k(device T* o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup T s[N];
  s[t] = o[t];
  if (N > 40) {
    threadgroup float more[8];
    more[t % 8] = s[t];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    s[t] = more[0];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[t] = s[t ^ 1];
}
template [[host_name("small")]] [[kernel]] decltype(k<half, 33>) k<half, 33>;
template [[host_name("large")]] [[kernel]] decltype(k<float, 64>) k<float, 64>;
kernel void none(device float* o [[buffer(0)]]) { *o = 1; }
"""
    )
    assert static_threadgroup_memory(Source.load(source)) == {"small": 80, "large": 288, "none": 0}
    report = Library(source).run("large", {0: np.zeros(64, np.float32)}, (1,), (64,))
    assert report.threadgroup_memory == 288


def test_command_line(tmp_path):
    (tmp_path / "k.metal").write_text(HEAD + REVERSE)
    np.save(tmp_path / "x.npy", np.arange(64, dtype=np.float32))

    def run(*arguments):
        command = [sys.executable, "-m", "mlx_anvil.mslc", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"}
        )

    listed = run("list", "k.metal")
    assert listed.returncode == 0
    assert "thread_index_in_threadgroup" in listed.stdout
    assert "const device float *" in listed.stdout
    assert "4096 bytes of static threadgroup memory" in listed.stdout
    ran = run("run", "k.metal", "reverse", "0=x.npy", "1=zeros:float32:64:o.npy", "--grid", "2", "--threadgroup", "32",
              "--threadgroup-memory", "128")  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    expected = np.roll(np.arange(64).reshape(2, 32)[:, ::-1], -1, 1).ravel()
    np.testing.assert_array_equal(np.load(tmp_path / "o.npy"), expected)
    (tmp_path / "bad.metal").write_text(
        HEAD + "kernel void k(device float* x [[buffer(0)]]) {\n  threadgroup float* p = x;\n}\n"
    )
    checked = run("check", "k.metal", "bad.metal")
    assert checked.returncode == 1
    assert "bad.metal:4:22: error: cannot initialize" in checked.stderr
    assert "k.metal: 0 errors" in checked.stderr


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integer_division_by_zero_is_survived(rng, dtype):
    """The result is unspecified in Metal. Other lanes and later code are not affected, and checks report it."""
    kind = METAL_TYPES[dtype]
    source = f"""kernel void k(const device {kind}* x [[buffer(0)]], const device {kind}* y [[buffer(1)]],
    device {kind}* quotient [[buffer(2)]], device {kind}* rest [[buffer(3)]], uint i [[thread_position_in_grid]]) {{
  quotient[i] = x[i] / y[i];
  rest[i] = x[i] % y[i];
}}"""
    x = rng.integers(1, 100, 64).astype(dtype)
    y = rng.integers(1, 9, 64).astype(dtype)
    zero = rng.random(64) < 0.5
    y[zero] = 0
    if dtype.startswith("i"):
        x[5], y[5], zero[5] = np.iinfo(dtype).min, -1, True  # no quotient either
    for options in (UNCHECKED, CHECKED):
        quotient, rest = (np.zeros(64, dtype) for _ in range(2))
        library = Library(HEAD + source, options=options)
        with pytest.raises(SimulationError) if options.checked else nullcontext() as caught:
            library.run("k", {0: x, 1: y, 2: quotient, 3: rest}, (2,), (32,), threads=2)
        if options.checked:
            assert [(f.kind, f.line) for f in caught.value.findings] == [("arithmetic", 5), ("arithmetic", 6)]
        np.testing.assert_array_equal(quotient[~zero], x[~zero] // y[~zero])
        np.testing.assert_array_equal(rest[~zero], x[~zero] % y[~zero])


def test_kernels_may_have_names_of_the_library(rng):
    source = """kernel void transpose(device int* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] += 1; }
template <typename T> kernel void dot(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] += 2; }
template [[host_name("dot_int")]] [[kernel]] decltype(dot<int>) dot<int>;
namespace mine { kernel void length(device int* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] += 4; } }"""
    x = np.zeros(32, np.int32)
    for name in ("transpose", "dot_int", "length"):
        library(source).run(name, {0: x}, (1,), (32,))
    assert (x == 7).all()

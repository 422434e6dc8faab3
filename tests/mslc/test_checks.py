"""What checked mode finds, and what it must accept."""

import platform
import subprocess
import sys

import numpy as np
import pytest

from mlx_anvil.mslc import Library, SimulationError, Source, checks
from mlx_anvil.mslc.compiler import CHECKED, UNCHECKED
from mlx_anvil.mslc.line_table import LineTable
from tests.mslc.msl import HEAD

ARGUMENTS = """const device float* x [[buffer(0)]], device float* o [[buffer(1)]],
    threadgroup float* shared [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]], uint n [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]"""
FIRST_LINE = len(HEAD.split("\n")) + ARGUMENTS.count("\n")  # of a body


def run(body, prelude="", groups=2, threads=64, options=CHECKED, size=128, **settings):
    """Runs a kernel's body on x = 0, 1, 2 ... and returns o."""
    source = HEAD + prelude + f"kernel void k({ARGUMENTS}) {{{body}}}\n"
    x, o = np.arange(size, dtype=np.float32), np.full(size, -1, np.float32)
    library = Library(source, options=options)
    library.run("k", {0: x, 1: o}, (groups,), (threads,), [256], **settings)
    return o


def findings(body, **settings):
    with pytest.raises(SimulationError) as caught:
        run(body, **settings)
    return caught.value.findings


def only(body, **settings):
    found = findings(body, **settings)
    assert len(found) == 1, "\n".join(map(str, found))
    return found[0]


# ---- races in threadgroup memory


def test_race_names_place_threads_and_the_other_place():
    found = [
        f for f in findings("\nshared[t] = x[t];\no[g * n + t] = shared[(t + 32) % n];") if f.kind == "threadgroup race"
    ]
    race = next(f for f in found if f.line == FIRST_LINE + 2)
    assert (race.kernel, race.file, race.column) == ("k", "kernel.metal", 1 + len("o[g * n + t] = "))
    assert (race.other_line, race.other_column) == (FIRST_LINE + 1, 1 + len("shared[t] "))
    assert abs(race.thread - race.other_thread) == 32
    assert "'shared'" in race.message
    assert "mem_threadgroup" in race.message


@pytest.mark.parametrize(
    "body",
    [
        "if (lane == 0) shared[0] = t; o[g * n + t] = 0;",  # write, write
        "shared[t] = 1; threadgroup_barrier(mem_flags::mem_threadgroup);"
        "o[g * n + t] = shared[n - 1 - t]; shared[t] = t;",  # read, then write
        "shared[t] = t; threadgroup_barrier(mem_flags::mem_none); o[g * n + t] = shared[n - 1 - t];",  # no fence
        "shared[t] = t; threadgroup_barrier(mem_flags::mem_threadgroup);"
        "if (t == 40) shared[1] = 7; float s = shared[1]; o[g * n + t] = simd_sum(s);",  # one writer among readers
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_threadgroup_race(body, seed):
    assert {f.kind for f in findings(body, seed=seed)} == {"threadgroup race"}


@pytest.mark.parametrize("seed", [0, 3])
def test_race_between_the_lanes_of_a_simd_group(seed):
    body = "shared[t] = 1; threadgroup_barrier(mem_flags::mem_threadgroup); shared[t] = t; {} o[g * n + t] = shared[t ^ 1];"
    kinds = {f.kind for f in findings(body.format(""), seed=seed)}
    assert kinds == {"threadgroup race"}
    for ordering in ("simdgroup_barrier(mem_flags::mem_threadgroup);", "float s = simd_sum(x[t]); o[g * n + t] = s;"):
        np.testing.assert_array_equal(run(body.format(ordering), seed=seed)[:64], np.arange(64) ^ 1)


@pytest.mark.parametrize("seed", [0, 5])
def test_no_race(seed):
    ordered = """
    threadgroup half halves[64]; threadgroup uchar bytes[64]; threadgroup atomic_uint sum;
    halves[t] = half(t); bytes[t] = uchar(t);      // neighbours in one word
    if (t == 0) atomic_store_explicit(&sum, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&sum, 1u, memory_order_relaxed);
    shared[0] = 5;                                 // all write the same
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float all = float(halves[n - 1 - t]) + float(bytes[n - 1 - t]) + shared[0];
    o[g * n + t] = all + atomic_load_explicit(&sum, memory_order_relaxed);"""
    expected = 2.0 * np.arange(63, -1, -1) + 5 + 64
    np.testing.assert_array_equal(run(ordered, seed=seed), np.tile(expected, 2))


# ---- races in device memory


def test_device_race_between_threadgroups():
    race = only("\nif (t == 3) o[5] = g;", threads=32, groups=8)
    assert (race.kind, race.line, race.buffer, race.offset) == ("device race", FIRST_LINE + 1, 1, 20)
    assert "of buffer 'o'" in race.message
    assert "of threadgroup" in race.message
    assert race.thread == race.other_thread == 3


@pytest.mark.parametrize(("flags", "ordered"), [("mem_device", True), ("mem_threadgroup", False)])
def test_device_memory_is_ordered_by_its_own_fence(flags, ordered):
    body = f"o[g * n + t] = t; threadgroup_barrier(mem_flags::{flags}); float y = o[g * n + n - 1 - t];\n"
    body += "threadgroup_barrier(mem_flags::mem_device); o[g * n + t] = y;"
    if ordered:
        np.testing.assert_array_equal(run(body)[:64], np.arange(63, -1, -1))
    else:
        assert only(body).kind == "device race"


def test_atomics_are_not_races_but_mixing_them_is():
    add = "atomic_fetch_add_explicit((device atomic_uint*)o, 1u, memory_order_relaxed);"
    result = run("if (g == 0 && t == 0) {} " + add, groups=2)
    assert result[:1].view(np.uint32) == np.float32(-1).view(np.uint32) + np.uint32(128)
    assert {f.kind for f in findings(add + " if (t == 9) o[0] = 3;")} == {"device race"}


def test_overlapping_buffers_are_one():
    library = Library(
        HEAD + "kernel void k(const device float* a [[buffer(0)]], device float* b [[buffer(1)]],"
        "uint i [[thread_position_in_grid]]) { b[i] = a[i] + 1; }",
        options=CHECKED,
    )
    values = np.arange(64, dtype=np.float32)
    library.run("k", {0: values, 1: values}, (2,), (32,))  # in place
    np.testing.assert_array_equal(values, np.arange(1, 65))
    with pytest.raises(SimulationError, match="device race"):
        library.run("k", {0: values[:-1], 1: values[1:]}, (63,), (32,), dispatch="threads")


# ---- bounds, alignment, initialisation


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("o[g * n + t + 1] = 0;", "device out of bounds", "write of 4 bytes at byte 512 of buffer 'o', which has 512"),
        ("o[t] = x[int(t) - 1];", "device out of bounds", "read of 4 bytes at byte -4 of buffer 'x'"),
        ("o[t] = x[1 << 28];", "device out of bounds", "read of 4 bytes at byte 1073741824 of buffer 'x'"),
        ("shared[t + 1] = 0;", "threadgroup out of bounds", "byte 256 of threadgroup memory 'shared', which has 256"),
        (
            "threadgroup float a[64]; a[t] = 0; threadgroup float* p = a; p[int(t) - 1] = 0;",
            "threadgroup out of bounds",
            "at byte -4",
        ),
        (
            "threadgroup float a[8]; a[t] = 0;",
            "array out of bounds",
            "index 8 is outside an array of type 'threadgroup",
        ),
        (
            "float a[8] = {}; a[t] = 1; o[t] = a[t ^ 1];",
            "array out of bounds",
            "index 8 is outside an array of type 'float[8]'",
        ),
        ("float a[8] = {}; fill(a, n); o[t] = a[t & 7];", "array out of bounds", "outside a variable"),
        ("device float* p = nullptr; if (t == 63) p += 1; *p = t;", "device out of bounds", "null pointer"),
        ("*(device float4*)(o + t) = 0;", "misaligned access", "write of type 'device float4' at byte 4 of buffer 'o'"),
        ("o[t] = *(const device int*)((const device char*)x + 2 * t);", "misaligned access", "not aligned to 4 bytes"),
    ],
)
def test_bad_access(body, kind, words):
    prelude = "void fill(thread float* p, uint n) { for (uint i = 0; i < n; ++i) p[i] = i * i; }\n"
    found = [f for f in findings("\n" + body, prelude=prelude, groups=2) if f.kind == kind]
    assert len(found) == 1
    assert words in found[0].message
    assert found[0].line in (FIRST_LINE + 2, len(HEAD.split("\n")))  # the body, or the line of fill()


@pytest.mark.parametrize(
    ("body", "column"),
    [
        ("o[g * n + t] = int(t) / int(x[t]);", len("o[g * n + t] = int(t) ")),
        ("o[g * n + t] = t % uint(x[t]);", len("o[g * n + t] = t ")),
        ("short a = short(x[t]); a /= a; o[g * n + t] = a;", len("short a = short(x[t]); a ")),
        ("int a = 0; o[g * n + t] = 5 / a;", len("int a = 0; o[g * n + t] = 5 ")),
    ],
)
def test_division_by_zero(body, column):
    division = only("\n" + body)
    assert (division.kind, division.line, division.column) == ("arithmetic", FIRST_LINE + 1, column + 1)
    assert "by zero" in division.message


@pytest.mark.skipif(platform.machine() != "x86_64", reason="arm64 has a quotient for it, and no signal")
def test_division_of_the_lowest_number():
    found = findings("\nint low = -2147483647 - 1 + int(x[0]); o[g * n + t] = low / (int(x[0]) - 1);")
    assert {(f.kind, f.line) for f in found} == {("arithmetic", FIRST_LINE + 1)}


def test_no_division_by_zero_where_the_branch_is_not_taken():
    run("o[g * n + t] = t ? int(n) / int(t) : 0;")


def test_uninitialised_threadgroup_memory():
    body = (
        "if (t != 5) shared[t] = t; threadgroup_barrier(mem_flags::mem_threadgroup);\no[g * n + t] = shared[n - 1 - t];"
    )
    found = only(body)
    assert (found.kind, found.line, found.thread) == ("uninitialised threadgroup memory", FIRST_LINE + 1, 58)
    assert "4 bytes at byte 20 of threadgroup memory 'shared'" in found.message


def test_limits_name_the_variable_place():
    found = only("\nthreadgroup float big[9000]; big[t] = t; o[t] = big[0];")
    assert (found.kind, found.line) == ("threadgroup memory", FIRST_LINE + 1)
    assert only("o[t] = 0;", threads=1025).kind == "bad launch"


def test_private_memory_and_tables_are_left_alone():
    prelude = """constant float table[4] = {1, 2, 4, 8};
    struct Pair { float a[6]; int n; };
    __attribute__((noinline)) void twice(thread Pair& p) { for (int i = 0; i < p.n; ++i) p.a[i] *= 2; }\n"""
    body = (
        "Pair p; p.n = 6; for (int i = 0; i < 6; ++i) p.a[i] = table[(t + i) % 4]; twice(p); o[g * n + t] = p.a[t % 6];"
    )
    t = np.arange(64)
    expected = 2 * np.array([1, 2, 4, 8])[(t + t % 6) % 4]
    np.testing.assert_array_equal(run(body, prelude=prelude)[:64], expected)


# ---- control flow


def test_collectives_under_divergence():
    shuffle = only("\nfloat s = 0; if (lane < 16) s = simd_shuffle_xor(x[t], 16); o[g * n + t] = s;")
    assert (shuffle.kind, shuffle.line) == ("collective divergence", FIRST_LINE + 1)
    barrier = only("if (lane < 16) simdgroup_barrier(mem_flags::mem_none); o[g * n + t] = 0;")
    assert barrier.kind == "collective divergence"
    run("float s = 0; if (lane < 16) s = simd_sum(x[t]) + simd_shuffle_down(x[t], 0); o[g * n + t] = s;")  # defined


def test_loop_over_memory_is_stopped():
    found = only("\nfor (uint i = 0; i < 10; i += n / 65) o[g * n + t] = i;", step_limit=100_000)
    assert (found.kind, found.line) == ("step limit", FIRST_LINE + 1)


# ---- findings as a whole


def test_findings_are_listed_once_a_place_and_do_not_outlive_their_run():
    racy = "\nif (lane == 0)\n  shared[0] = t;\no[g * n + t] = g;"
    found = findings(racy, groups=40, size=40 * 64)
    assert [(f.kind, f.line) for f in found] == [("threadgroup race", FIRST_LINE + 2)]
    np.testing.assert_array_equal(run("o[g * n + t] = t;")[64:], np.arange(64))
    findings("o[g * n + t + 1] = 0;")
    np.testing.assert_array_equal(run("o[g * n + t] = t;")[64:], np.arange(64))


def test_places_in_headers_and_macros(tmp_path):
    (tmp_path / "store.h").write_text(
        "// first line\n#define STORE(p, v) p = (v)\ninline void put(device float* p) {\n  STORE(p[1], 2);\n}\n"
    )
    source = (
        HEAD + '#include "store.h"\nkernel void k(device float* o [[buffer(0)]]) {\n  put(o);\n  STORE(o[0], 1);\n}\n'
    )
    library = Library(Source.load(source, [tmp_path], {}), options=CHECKED)
    with pytest.raises(SimulationError) as caught:
        library.run("k", {0: np.zeros(1, np.float32)}, (1,), (1,))
    assert (caught.value.findings[0].file, caught.value.findings[0].line) == (str(tmp_path / "store.h"), 4)


def test_results_equal_those_of_unchecked_runs():
    body = "shared[t] = x[g * n + t]; threadgroup_barrier(mem_flags::mem_threadgroup); o[g * n + t] = simd_sum(shared[n - 1 - t]);"
    np.testing.assert_array_equal(run(body), run(body, options=UNCHECKED))


# ---- verify


ARRIVAL = """kernel void k(device atomic_uint* counter [[buffer(0)]], device uint* o [[buffer(1)]],
    uint i [[thread_position_in_grid]]) { o[i] = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed); }"""


def test_verify_compares_schedules():
    def buffers():
        return {0: np.zeros(1, np.uint32), "o": np.zeros(256, np.uint32)}

    with pytest.raises(SimulationError, match="'o' depends on the order in which threads run") as caught:
        checks.verify(HEAD + ARRIVAL, "k", buffers(), (4,), (64,))
    assert caught.value.findings[0].kind == checks.SCHEDULE
    given = buffers()
    checks.verify(HEAD + ARRIVAL, "k", given, (4,), (64,), deterministic=False)
    assert given[0][0] == 256
    assert sorted(given["o"]) == list(range(256))


def test_verify_needs_a_checked_library():
    with pytest.raises(ValueError, match="options=CHECKED"):
        checks.verify(Library(HEAD + ARRIVAL), "k", {}, (1,), (1,))
    with pytest.raises(ValueError, match="seed"):
        checks.verify(HEAD + ARRIVAL, "k", {}, (1,), (1,), seeds=())


# ---- line table


def test_line_table_rejects_other_files(tmp_path):
    (tmp_path / "text").write_bytes(b"not a library at all" * 10)
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        LineTable(tmp_path / "text")


def test_line_table_of_an_address_outside_is_none():
    table = LineTable(
        Library(HEAD + "kernel void k(device float* o [[buffer(0)]]) { o[0] = 1; }", options=CHECKED).compiled.path
    )
    assert table.find(0) is None
    assert table.find(1 << 40) is None
    assert "mslc_kernels" in table.symbols


# ---- command line


def test_run_checked(tmp_path):
    (tmp_path / "racy.metal").write_text(
        HEAD
        + "kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {\n  o[i / 2] = i;\n}\n"
    )
    # One threadgroup: of several, which run side by side, any may be the first to find its race.
    launch = ["racy.metal", "k", "0=zeros:float32:64", "--grid", "1", "--threadgroup", "64"]
    command = [sys.executable, "-m", "mlx_anvil.mslc", "run", *launch]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    checked = subprocess.run([*command, "--checked"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 1
    assert "racy.metal:4:12: device race: write of 4 bytes at byte 0 of buffer 'o'" in checked.stderr

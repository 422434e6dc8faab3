"""Profiles of kernels whose counts can be derived from their source by hand."""

import numpy as np
import pytest

from mlx_anvil.mslc import PROFILED, Library
from mlx_anvil.mslc.profile import by_kernel, combine
from tests.mslc.msl import HEAD


def profile(body, threads=32, threadgroup=32, dispatch="threads", parameters=(), buffers=(), prelude="", **launch):
    """Profiles a kernel with a float input `x`, an output `y` of 4096 elements, and what `parameters` adds."""
    bindings = ["const device float* x [[buffer(0)]]", "device float* y [[buffer(1)]]", *parameters]
    builtins = ["uint i [[thread_position_in_grid]]", "uint lane [[thread_index_in_simdgroup]]"]
    source = f"{HEAD}{prelude}\nkernel void k({', '.join([*bindings, *builtins])}) {{\n{body}\n}}\n"
    library = Library(source, options=PROFILED)
    arrays = [np.arange(4096, dtype=np.float32), np.zeros(4096, np.float32), *buffers]
    return library.run("k", dict(enumerate(arrays)), (threads,), (threadgroup,), dispatch=dispatch, **launch).profile


def metrics(body, **launch):
    return profile(body, **launch).metrics()


# ---- device memory


@pytest.mark.parametrize(
    ("index", "lines", "unique"),
    [
        ("i", 1, 128),  # 32 floats in a row
        ("i + 16", 2, 128),  # the same, across a line
        ("2 * i", 2, 128),
        ("32 * i", 32, 128),  # a line for every lane
        ("33 * i", 32, 128),
        ("0u", 1, 4),  # all the same
        ("i / 8", 1, 16),
        ("31 - i", 1, 128),
        ("(i * 7) % 32", 1, 128),
        ("i % 2 * 1024 + i / 2", 2, 128),
    ],
)
def test_lines_of_one_access(index, lines, unique):
    p = profile(f"y[i] = x[{index}];")
    (read,) = [site for site in p.sites if site.buffer == "x"]
    assert (read.accesses, read.lanes, read.bytes, read.transactions) == (1, 32, 128, lines)
    assert read.ideal_transactions == 1
    assert p.metrics()["device_bytes_read_unique"] == unique
    assert (read.line, read.kind, read.memory) == (5, "read", "device")


def test_vector_loads_need_four_lines():
    m = metrics("reinterpret_cast<device float4*>(y)[i] = reinterpret_cast<const device float4*>(x)[i];")
    assert (m["device_accesses"], m["device_bytes_read"], m["device_bytes_written"]) == (2, 512, 512)
    assert (m["lines_per_access"], m["ideal_lines_per_access"], m["coalescing"]) == (4, 4, 1)


def test_requested_and_unique_bytes():
    """Three-point stencil on 64 threads: 3 reads each, of 66 different elements."""
    m = metrics("y[i] = x[i] + x[i + 1] + x[i + 2];", threads=64)
    assert (m["device_bytes_read"], m["device_bytes_read_unique"]) == (64 * 3 * 4, 66 * 4)
    assert (m["device_bytes_written"], m["device_bytes_written_unique"]) == (64 * 4, 64 * 4)


def test_unique_bytes_of_threadgroups():
    """A threadgroup has two SIMD groups, which read the same 32 elements; three threadgroups read the same too."""
    p = profile("y[i % 64] = x[lane];", threads=192, threadgroup=64)
    uses = {b.name: (b.bytes_read, b.bytes_written, b.bytes_of_threadgroups) for b in p.buffers}
    assert uses == {"x": (32 * 4, 0, 3 * 32 * 4), "y": (0, 64 * 4, 3 * 64 * 4)}
    (both,) = [b for b in profile("y[i % 64] += 1;", threads=192, threadgroup=64).buffers if b.name == "y"]
    assert both.bytes_of_threadgroups == 3 * 2 * 64 * 4


def test_read_modify_write_counts_both():
    m = metrics("y[i] += 1;")
    assert (m["device_bytes_read"], m["device_bytes_written"]) == (128, 128)


def test_constant_memory_is_apart():
    p = profile("y[i] = x[i] * n;", parameters=["constant float& n [[buffer(2)]]"], buffers=[2.0])
    m = p.metrics()
    assert (m["constant_bytes_read"], m["device_bytes_read"]) == (128, 128)
    assert [(b.name, b.memory, b.bytes_read) for b in p.buffers] == [
        ("x", "device", 128),
        ("y", "device", 0),
        ("n", "constant", 4),
    ]


def test_atomics():
    p = profile(
        "atomic_fetch_add_explicit(&n[i % 2], 1u, memory_order_relaxed);",
        parameters=["device atomic_uint* n [[buffer(2)]]"],
        buffers=[np.zeros(2, np.uint32)],
    )
    assert p.metrics()["device_atomics"] == 32
    assert [(s.kind, s.accesses, s.bytes) for s in p.sites] == [("atomic", 1, 128)]


# ---- lanes that diverge


def test_ragged_last_threadgroup():
    m = metrics("y[i] = x[i];", threads=40)
    assert m["device_accesses"] == 4
    assert m["access_utilisation"] == 80 / 128


def test_branches_are_counted_apart():
    p = profile("if (lane < 8) y[i] = x[i]; else y[2 * i] = 2 * x[i + 1024];")
    reads, writes = ([s for s in p.sites if s.kind == kind] for kind in ("read", "write"))
    assert sorted((s.accesses, s.lanes) for s in reads) == [(1, 8), (1, 24)]
    assert sum(s.lanes for s in writes) == 32
    assert p.metrics()["device_bytes_read"] == 128


def test_lanes_with_shorter_loops_wait_behind_the_loop():
    """Twice, lane i reads i % 4 + 1 times in a loop and then once after it."""
    body = """
      float sum = 0;
      for (uint outer = 0; outer < 2; ++outer) {
        #pragma clang loop unroll(disable)
        for (uint k = 0; k <= lane % 4; ++k) {
          sum += x[32 * k + i];
        }
        sum += x[512 + i + 32 * outer];
      }
      y[i] = sum;
    """
    p = profile(body)
    by_line = {site.line: site for site in p.sites if site.buffer == "x"}
    inner, behind = by_line[10], by_line[12]
    assert (inner.accesses, inner.lanes) == (2 * 4, 2 * (32 + 24 + 16 + 8))
    assert (behind.accesses, behind.lanes) == (2, 64)
    assert behind.transactions == 2


def test_early_return():
    p = profile("if (lane % 2) return;\ny[i] = x[i];")
    assert {(s.accesses, s.lanes) for s in p.sites} == {(1, 16)}


def test_the_schedule_does_not_matter():
    body = "float v = simd_sum(x[i]);\nif (lane < 5) y[i] = v; threadgroup_barrier(mem_flags::mem_none);\ny[i + 64] = x[2 * i];"
    results = [metrics(body, threads=128, threadgroup=64, seed=seed) for seed in (0, 1, 2)]
    assert results[0] == results[1] == results[2]


# ---- threadgroup memory


@pytest.mark.parametrize(
    ("index", "cycles"),
    [
        ("lane", 1),
        ("2 * lane", 2),
        ("32 * lane", 32),
        ("33 * lane", 1),  # padding by a word
        ("0u", 1),  # one word for all
        ("lane / 4", 1),
        ("lane % 2 * 32", 2),
    ],
)
def test_bank_conflicts(index, cycles):
    body = f"""
      threadgroup float t[33 * 32];
      for (uint k = lane; k < 33 * 32; k += 32) t[k] = x[k];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      y[i] = t[{index}];
    """
    p = profile(body)
    (read,) = [s for s in p.sites if s.memory == "threadgroup" and s.kind == "read"]
    assert (read.accesses, read.bytes, read.transactions, read.ideal_transactions) == (1, 128, cycles, 1)
    m = p.metrics()
    assert m["bank_conflicts"] == cycles - 1
    assert (m["threadgroup_bytes_written"], m["threadgroup_memory"]) == (33 * 32 * 4, 33 * 32 * 4)


def test_vector_and_half_access_to_threadgroup_memory():
    """float4: 128 words need four cycles, packed too. half: two lanes share a word."""
    body = """
      threadgroup float4 t[32];
      threadgroup half h[32];
      t[lane] = float4(x[i]);
      h[lane] = half(x[i]);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      y[i] = t[31 - lane].x + h[31 - lane];
    """
    p = profile(body)
    writes = {s.bytes: s for s in p.sites if s.memory == "threadgroup" and s.kind == "write"}
    assert (writes[512].transactions, writes[512].ideal_transactions) == (4, 4)
    assert (writes[64].transactions, writes[64].ideal_transactions) == (1, 1)


# ---- operations


def test_operations():
    body = """
      float v = simd_sum(x[i]) + exp(x[i]);
      if (lane < 8) v += simd_max(v);
      threadgroup_barrier(mem_flags::mem_none);
      float4 w = log(float4(v));
      y[i] = rsqrt(v) + w.x + w.y + w.z + w.w;
    """
    m = metrics(body, threads=64, threadgroup=64)
    assert (m["collectives"], m["divergent_collectives"], m["barriers"]) == (4, 2, 1)
    assert m["collective_utilisation"] == (32 + 8) / 64
    assert m["transcendentals"] == 64 * 6


@pytest.mark.parametrize("type_", ["float", "half"])
def test_matrix_multiplies(type_):
    body = f"""
      simdgroup_matrix<{type_}, 8, 8> a, b;
      simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0);
      const device {type_}* tiles = reinterpret_cast<const device {type_}*>(x);
      simdgroup_load(b, tiles, 8);
      for (uint k = 0; k < 3; ++k) {{
        simdgroup_load(a, tiles + 64 * k, 8);
        simdgroup_multiply_accumulate(c, a, b, c);
      }}
      simdgroup_store(c, y + i / 32 * 64, 8);
    """
    m = metrics(body, threads=64, threadgroup=64)
    assert m["matrix_multiplies"] == 2 * 3
    size = 4 if type_ == "float" else 2
    assert (m["device_bytes_read"], m["device_bytes_read_unique"]) == (2 * 4 * 64 * size, 3 * 64 * size)
    assert m["device_bytes_written"] == 2 * 64 * 4


# ---- launches


def test_launches_add_up():
    one, two = profile("y[i] = x[i];"), profile("y[i] = exp(x[2 * i]);", threads=64)
    total = combine([one, two])
    assert total.launches == 2
    for name in ("device_bytes_read", "device_lines", "transcendentals", "device_bytes_read_unique"):
        assert total.metrics()[name] == one.metrics()[name] + two.metrics()[name]
    assert total.metrics()["lines_per_access"] == (1 + 1 + 2 * 2 + 2) / 6
    assert [p.launches for p in by_kernel([one, two, one])] == [3]


def test_results_are_those_of_an_ordinary_run(rng):
    x, y = rng.standard_normal(128).astype(np.float32), np.zeros(128, np.float32)
    source = HEAD + "kernel void k(const device float* x, device float* y, uint i [[thread_position_in_grid]]) {"
    source += " y[i] = simd_sum(x[i]); }\n"
    source = source.replace("* x,", "* x [[buffer(0)]],").replace("* y,", "* y [[buffer(1)]],")
    report = Library(source, options=PROFILED).run("k", {0: x, 1: y}, (128,), (64,), dispatch="threads")
    expected = np.repeat(x.reshape(4, 32).sum(1, keepdims=True), 32, 1)
    np.testing.assert_allclose(
        y.reshape(4, 32), expected, rtol=0, atol=1e-5
    )  # the sum may be near 0, its terms are not
    assert report.profile.kernel == "k"

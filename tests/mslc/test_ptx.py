"""PTX text and descriptions. Running them needs a GPU: see gpu/run_ptx.py."""

import json
import re
from dataclasses import replace
from functools import cache, cached_property

import make_bundle
import pytest
import run_ptx
from click.testing import CliRunner

from mlx_anvil.mslc import UNCHECKED, Library, Source
from mlx_anvil.mslc.commands.ptx import command
from mlx_anvil.mslc.ptx import compile_ptx
from tests.mslc.msl import HEAD
from tests.mslc.ptx_support import METAL, has_ptxas, ptx


def entries(module):
    """Bodies by entry name."""
    pattern = r"^\.visible \.entry (\w+)\(.*?^\{(.*?)^\}"
    return dict(re.findall(pattern, module.text, re.MULTILINE | re.DOTALL))


# ---- launching


def test_parameters_follow_bindings():
    module = ptx(
        """
        struct Shape { long size; int rank; };
        struct Large { float x[1000]; };
        kernel void k(constant Shape& shape [[buffer(3)]], device float* out [[buffer(1)]],
            const device half* in [[buffer(0)]], constant int& n [[buffer(2)]], constant Large& large [[buffer(4)]],
            uint i [[thread_position_in_grid]]) {
          out[i] = float(in[i]) + float(n) + float(shape.size) + large.x[i];
        }"""
    )
    found = [(p.name, p.kind, p.index, p.size) for p in module.kernels[0].parameters]
    assert found == [
        ("in", "pointer", 0, 8),
        ("out", "pointer", 1, 8),
        ("n", "value", 2, 4),
        ("shape", "value", 3, 16),
        ("large", "pointer", 4, 8),
    ]
    assert re.search(r"ld\.param\.\w+\s+%\w+, \[k_param_2\]", module.text)
    assert re.search(r"ld\.param\.\w+\s+%\w+, \[k_param_3\]", module.text)
    assert ".local" not in module.text
    assert json.loads(json.dumps(module.to_json()))["kernels"][0]["entry"] == "k"


def test_values_with_computed_index_stay_in_parameters():
    module = ptx(
        """
        struct Strides { long s[8]; };
        kernel void k(device long* out [[buffer(0)]], constant Strides& strides [[buffer(1)]],
            uint i [[thread_position_in_grid]]) { out[i] = strides.s[i % 8]; }"""
    )
    assert ".local" not in module.text
    assert "ld.param" in module.text


def test_dynamic_threadgroup_memory_is_one_block():
    module = ptx(
        """
        kernel void k(device float* out [[buffer(0)]], threadgroup float* a [[threadgroup(0)]],
            threadgroup float* b [[threadgroup(1)]], uint i [[thread_index_in_threadgroup]]) {
          threadgroup float fixed[40];
          fixed[i % 40] = a[i] = out[i];
          b[i] = 1.0f;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          out[i] = a[i + 1] + b[i + 1] + fixed[(i + 1) % 40];
        }"""
    )
    kernel = module.kernels[0]
    assert kernel.threadgroup_buffers == [0, 1]
    assert [(p.kind, p.index, p.size) for p in kernel.parameters] == [("pointer", 0, 8), ("threadgroup_offset", 1, 4)]
    assert kernel.static_threadgroup_memory == 160
    assert ".extern .shared .align 16 .b8 mslc_dynamic_threadgroup_memory[]" in module.text
    assert "bar.sync" in module.text
    assert not re.search(r"\b(ld|st)\.[bfu]\d+", module.text)  # a generic access


def test_thread_limit_becomes_maxntid():
    module = ptx(
        """
        template <int N> [[kernel, max_total_threads_per_threadgroup(N * 2)]] void t(device int* o [[buffer(0)]]) { o[0] = N; }
        template [[host_name("t_64")]] [[kernel]] decltype(t<64>) t<64>;
        kernel void free(device int* o [[buffer(0)]]) { o[0] = 1; }"""
    )
    assert {k.name: k.max_threads for k in module.kernels} == {"t_64": 128, "free": None}
    assert module.text.count(".maxntid") == 1
    assert ".maxntid 128, 1, 1" in module.text


def test_missing_function_constant_is_an_error():
    text = "constant int n [[function_constant(3)]]; kernel void k(device int* o [[buffer(0)]]) { o[0] = n; }"
    with pytest.raises(ValueError, match="constant n"):
        ptx(text)
    assert "st.global" in ptx(text, constants={3: 4}).text


# ---- instructions


def test_vector_loads_stay_vectors():
    module = ptx(
        """
        kernel void k(const device float4* a [[buffer(0)]], device float4* o [[buffer(1)]],
            uint i [[thread_position_in_grid]]) { o[i] = a[i] * 2.0f; }
        kernel void h(const device uint4* a [[buffer(0)]], device half4* o [[buffer(1)]],
            uint i [[thread_position_in_grid]]) {
          const uint4 raw = a[i];
          o[i] = as_type<half4>(raw.xy) + as_type<half4>(raw.zw);
        }"""
    )
    found = entries(module)
    assert re.search(r"ld\.global\.v4\.[bfu]32", found["k"])
    assert re.search(r"st\.global\.v4\.[bfu]32", found["k"])
    assert "ld.global.v4" in found["h"]


ROUNDED, FUSABLE = r"\b(?:add|sub|mul)\.rn\.f32\b", r"\b(?:add|sub|mul)\.f32\b"


def test_maths_functions_are_not_fused():
    """These functions compute what a rounding lost. Without .rn, ptxas or the compiler could fuse the operations."""
    module = compile_ptx(Source.load(make_bundle.math_source()))
    assert re.search(FUSABLE, module.text) is None
    assert len(re.findall(ROUNDED, entries(module)["math_pow"])) > 20


def test_arithmetic_of_kernels_is_fused():
    found = entries(
        ptx(
            """
        kernel void k(device float* x [[buffer(0)]]) { const float product = x[0] * x[1]; x[0] = product + x[2]; }
        kernel void sum(device float* x [[buffer(0)]]) { x[0] += x[1]; }"""
        )
    )
    assert "fma.rn.f32" in found["k"]
    assert re.search(FUSABLE, found["sum"])


def test_simd_functions_use_shuffles_and_votes():
    module = ptx(
        """
        kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
          const float s = simd_sum(o[i]);
          simdgroup_barrier(mem_flags::mem_none);
          o[i] = simd_any(s > 1.0f) ? s : quad_sum(s);
        }"""
    )
    assert module.text.count("shfl.sync.bfly") == 7
    assert "vote.sync.ballot" in module.text
    assert "bar.warp.sync" in module.text
    assert not module.kernels[0].full_simdgroups


@pytest.mark.parametrize(("components", "exchanges"), [(2, 1 + 4 + 2), (4, 2 + 1 + 3 + 4)])
def test_sums_of_vectors_share_exchanges(components, exchanges):
    """In the first steps lanes exchange half of their components; at the end each lane has all sums."""
    module = ptx(
        f"""
        kernel void k(device float{components}* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {{
          o[i] = simd_sum(o[i]);
        }}"""
    )
    all_lanes_at_once = module.text.count("shfl.sync.bfly") + components
    assert all_lanes_at_once == exchanges
    assert module.text.count("shfl.sync.idx") >= components


def test_atomics_have_device_scope():
    module = ptx(
        """
        kernel void k(device atomic_uint* u [[buffer(0)]], device atomic_float* f [[buffer(1)]]) {
          threadgroup atomic_int t;
          atomic_fetch_add_explicit(u, 1u, memory_order_relaxed);
          atomic_fetch_add_explicit(f, 1.0f, memory_order_relaxed);
          atomic_fetch_max_explicit(&t, 1, memory_order_relaxed);
          atomic_fetch_max_explicit(f, 2.0f, memory_order_relaxed);
        }"""
    )
    # Without a word for it, the scope is that of the GPU and the order relaxed.
    assert re.search(r"(atom|red)(\.relaxed\.gpu)?\.global\.add\.u32", module.text)
    assert re.search(r"(atom|red)(\.relaxed\.gpu)?\.global\.add\.f32", module.text)
    assert re.search(r"(atom|red)(\.relaxed\.gpu)?\.shared\.max\.s32", module.text)
    assert "atom.relaxed.gpu.global.cas.b32" in module.text
    assert module.kernels[0].static_threadgroup_memory == 4
    assert ".sys" not in module.text


MULTIPLY = """
template <typename T, int M, int K>
[[kernel]] void multiply(const device T* a [[buffer(0)]], const device T* b [[buffer(1)]], device float* d [[buffer(2)]]) {
  simdgroup_matrix<T, 8, 8> as[M][K], bs[K];
  simdgroup_float8x8 sums[M];
#pragma clang loop unroll(full)
  for (int k = 0; k < K; ++k) {
    simdgroup_load(bs[k], b + 64 * k);
#pragma clang loop unroll(full)
    for (int m = 0; m < M; ++m) simdgroup_load(as[m][k], a + 64 * (m * K + k));
  }
#pragma clang loop unroll(full)
  for (int m = 0; m < M; ++m) {
    sums[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma clang loop unroll(full)
    for (int k = 0; k < K; ++k) simdgroup_multiply_accumulate(sums[m], as[m][k], bs[k], sums[m]);
    simdgroup_store(sums[m], d + 64 * m);
  }
}
"""


def shapes(type_name, m, k):
    name = f"{type_name}, {m}, {k}"
    text = f'{MULTIPLY} template [[host_name("k")]] [[kernel]] decltype(multiply<{name}>) multiply<{name}>;'
    module = ptx("#include <metal_simdgroup_matrix>\n" + text)
    assert module.kernels[0].full_simdgroups
    return re.findall(r"mma\.sync\.aligned\.(m16n8k\d+)\S*?\.(tf32|f16|bf16)\.", module.text)


@pytest.mark.parametrize(
    ("type_name", "m", "k", "expected"),
    [
        ("half", 4, 4, [("m16n8k16", "f16")] * 4),
        ("bfloat", 2, 2, [("m16n8k16", "bf16")]),
        ("half", 1, 1, [("m16n8k8", "f16")]),
        ("half", 3, 2, [("m16n8k16", "f16")] * 2),
        ("float", 2, 2, [("m16n8k8", "tf32")] * 6),
        ("float", 1, 1, [("m16n8k8", "tf32")] * 3),
    ],
)
def test_adjacent_products_fill_the_unit(type_name, m, k, expected):
    assert shapes(type_name, m, k) == expected


@pytest.mark.parametrize("transpose", ["false", "true"])
def test_second_operand_is_loaded_the_way_round_that_the_unit_wants(transpose):
    """The unit wants columns, which are the rows of a transpose. Loads transpose the rest, so no registers are
    moved."""
    module = ptx(
        f"""
        kernel void k(const device half* a [[buffer(0)]], device float* out [[buffer(1)]],
            uint t [[thread_index_in_threadgroup]]) {{
          threadgroup half tile[16 * 8];
          for (uint i = t; i < 128; i += 32) tile[i] = a[128 + i];
          threadgroup_barrier(mem_flags::mem_threadgroup);
          simdgroup_float8x8 sum = simdgroup_float8x8(0.0f);
          for (int i = 0; i < 2; ++i) {{
            simdgroup_half8x8 left, right;
            simdgroup_load(left, a + 8 * i, 16);
            simdgroup_load(right, tile + 64 * i, 8, ulong2(0), {transpose});
            simdgroup_multiply_accumulate(sum, left, right, sum);
          }}
          simdgroup_store(sum, out, 8);
        }}"""
    )
    (body,) = entries(module).values()
    assert "movmatrix" not in body
    loads = re.findall(r"ldmatrix\.\S+", body)
    assert loads
    assert {".trans" in load for load in loads} == {transpose == "false"}


# ---- the command, and the checks that run on a GPU


def test_command_writes_text_and_description(tmp_path):
    kernel = tmp_path / "double.metal"
    kernel.write_text(HEAD + "kernel void twice(device float* x [[buffer(0)]]) { x[0] *= 2; }\n")
    arguments = [str(kernel), "--arch", "sm_80,sm_90", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(command, [*arguments, *(["--assemble"] if has_ptxas() else [])])
    assert result.exit_code == 0, result.output
    for arch in ("sm_80", "sm_90"):
        assert f".target {arch}" in (tmp_path / "out" / f"double.{arch}.ptx").read_text()
        description = json.loads((tmp_path / "out" / f"double.{arch}.json").read_text())
        assert description["kernels"][0]["parameters"][0]["kind"] == "pointer"


def test_command_reports_places(tmp_path):
    kernel = tmp_path / "wrong.metal"
    kernel.write_text(HEAD + "kernel void k(device float* x [[buffer(0)]]) {\n  x[0] = y;\n}\n")
    result = CliRunner().invoke(command, [str(kernel), "-o", str(tmp_path)])
    assert result.exit_code == 1
    assert "wrong.metal:4:10" in result.output


class Simulated:
    """What run_ptx.py calls a module, in the simulator: shows that the checks themselves are right."""

    def __init__(self, text, constants):
        self.text, self.constants = text, constants

    @cached_property
    def kernels(self):
        return Library(self.text, constants=self.constants).kernels

    @cache  # noqa: B019
    def library(self, kernel):
        return Library(self.text, constants=self.constants, options=replace(UNCHECKED, kernels=(kernel,)))

    def run(self, kernel, buffers, grid, block, threadgroup=None):
        self.library(kernel).run(kernel, buffers, grid, block, threadgroup_memory=threadgroup or {})


# sdpa_vector and attention have tests of their own in control/.
CHECKED = ("atomics", "dynamic_memory", "gemm", "groups", "matrix", "positions", "ragged_groups", "rounding", "values")
if METAL is not None:
    CHECKED += ("flash_attention", "flash_attention_decode", "quantized")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_checks_for_the_gpu_hold_in_the_simulator(name):
    available = make_bundle.sources(METAL)
    checks = run_ptx.Checks(lambda module: Simulated(*available[module]))
    lines = list(getattr(checks, f"check_{name}")())
    assert lines
    assert not [line for line in lines if "FAILED" in line]

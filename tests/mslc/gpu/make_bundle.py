"""Compiles what run_ptx.py checks into one folder, which then needs neither this package nor a compiler.

    python tests/mslc/gpu/make_bundle.py FOLDER [--metal DIR] [--arch sm_90]

DIR is the folder above the project's `metal/`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "control")]

import functions  # noqa: E402
from mlx_kernels import ENCODE, include_dir, source  # noqa: E402
from project_checks import ATTENTION_CONSTANTS, QUANTIZED_CONSTANTS  # noqa: E402

from mlx_anvil.mslc.compiler import run_preprocessor, run_rewriter  # noqa: E402
from mlx_anvil.mslc.preprocess import Source  # noqa: E402
from mlx_anvil.mslc.ptx import compile_ptx  # noqa: E402

HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
# Any mention of a matrix makes the compiler renumber the lanes of the whole file.
PERMUTED = "simdgroup_float8x8 not_called();\n"


def math_source() -> str:
    kernels = [
        f"kernel void math_{name}(const device float* a [[buffer(0)]], device float* out [[buffer(1)]], "
        f"uint i [[thread_position_in_grid]]) {{ out[i] = precise::{name}(a[i]); }}\n"
        for name in functions.UNARY
    ]
    kernels += [
        f"kernel void math_{name}(const device float* a [[buffer(0)]], const device float* b [[buffer(1)]], "
        f"device float* out [[buffer(2)]], uint i [[thread_position_in_grid]]) {{ out[i] = {name}(a[i], b[i]); }}\n"
        for name in functions.BINARY
    ]
    return HEAD + "".join(kernels)


def group_source() -> str:
    """All SIMD-group functions, and some of them in a threadgroup whose last SIMD group is not full."""
    rows = "".join(f"  out[{i} * n + t] = {text};\n" for i, text in enumerate(functions.GROUP))
    return (
        HEAD
        + f"""
kernel void groups(const device uint* xs [[buffer(0)]], const device float* fs [[buffer(1)]],
    device uint* out [[buffer(2)]], constant uint& n [[buffer(3)]], uint t [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {{
  const uint x = xs[t];
  const float f = fs[t];
{rows}}}
kernel void ragged(const device uint* xs [[buffer(0)]], device uint* out [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint n [[threads_per_threadgroup]]) {{
  const uint x = xs[t];
  out[t] = simd_sum(x);
  out[n + t] = simd_max(x);
  out[2 * n + t] = simd_prefix_inclusive_sum(x);
  out[3 * n + t] = simd_prefix_exclusive_sum(x);
  out[4 * n + t] = uint(ulong(simd_active_threads_mask()));
  out[5 * n + t] = quad_sum(x);
  const uint4 four = simd_sum(uint4(x, 3 * x, x * x, 1));
  for (int i = 0; i < 4; ++i) {{
    out[(6 + i) * n + t] = four[i];
  }}
  const uint2 two = simd_sum(uint2(x, x * x));
  out[10 * n + t] = two.x;
  out[11 * n + t] = two.y;
}}
"""
    )


POSITIONS = """
kernel void positions(device uint* out [[buffer(0)]], uint3 grid [[thread_position_in_grid]],
    uint3 local [[thread_position_in_threadgroup]], uint3 size [[threads_per_threadgroup]],
    ushort3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
    uint3 total [[threads_per_grid]], uint index [[thread_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint simds [[simdgroups_per_threadgroup]], uint quad [[quadgroup_index_in_threadgroup]],
    uint lane4 [[thread_index_in_quadgroup]], uint width [[threads_per_simdgroup]]) {
  const uint per_group = size.x * size.y * size.z;
  const uint group_index = group.x + groups.x * (group.y + groups.y * group.z);
  device uint* o = out + 24 * (group_index * per_group + local.x + size.x * (local.y + size.y * local.z));
  const uint values[24] = {grid.x, grid.y, grid.z, local.x, local.y, local.z, size.x, size.y, size.z, group.x, group.y,
      group.z, groups.x, groups.y, groups.z, total.x, total.y, total.z, index, lane, simd, simds, quad, lane4 + width};
  for (int i = 0; i < 24; ++i) o[i] = values[i];
}
"""

MEMORY = """
kernel void dynamic_memory(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
    threadgroup float* first [[threadgroup(0)]], threadgroup half4* second [[threadgroup(1)]],
    uint t [[thread_index_in_threadgroup]], uint n [[threads_per_threadgroup]],
    uint g [[threadgroup_position_in_grid]]) {
  threadgroup int fixed[64];
  first[t] = in[g * n + t];
  second[t] = half4(half(t), half(g), 3.0h, 4.0h);
  if (t < 64) fixed[t] = int(t) * 5;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint other = n - 1 - t;
  out[g * n + t] = first[other] + float(second[other].x) * 1000.0f + float(second[other].y) + float(fixed[t % 64]);
}

struct Values { int small; float real; half4 four; long wide[3]; };
kernel void values(device float* out [[buffer(0)]], constant int& whole [[buffer(1)]],
    constant Values& values [[buffer(2)]], constant half& tiny [[buffer(3)]], constant uchar& byte [[buffer(4)]],
    const constant float* table [[buffer(5)]], uint t [[thread_position_in_grid]]) {
  out[t] = float(whole) + float(values.small) * values.real + float(values.four.z) + float(values.wide[t % 3]) +
      float(tiny) + float(byte) + table[t];
}

kernel void atomics(device atomic_uint* u [[buffer(0)]], device atomic_int* s [[buffer(1)]],
    device atomic_float* f [[buffer(2)]], device uint* tickets [[buffer(3)]],
    uint t [[thread_position_in_grid]], uint l [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint local[2];
  if (l < 2) atomic_store_explicit(&local[l], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const auto r = memory_order_relaxed;
  tickets[atomic_fetch_add_explicit(&u[0], 1u, r)] = 1;
  atomic_fetch_sub_explicit(&u[1], 3u, r);
  atomic_fetch_max_explicit(&u[2], t * 2654435761u, r);
  atomic_fetch_min_explicit(&u[3], t * 2654435761u, r);
  atomic_fetch_and_explicit(&u[4], ~(1u << (t % 7)), r);
  atomic_fetch_or_explicit(&u[5], 1u << (t % 9), r);
  atomic_fetch_xor_explicit(&u[6], t, r);
  uint seen = atomic_load_explicit(&u[7], r);
  while (!atomic_compare_exchange_weak_explicit(&u[7], &seen, seen + 2, r, r)) {}
  atomic_fetch_max_explicit(&s[0], int(t) - 100, r);
  atomic_fetch_min_explicit(&s[1], 50 - int(t), r);
  atomic_exchange_explicit(&s[2], 9, r);
  atomic_fetch_add_explicit(&f[0], 0.5f, r);
  atomic_fetch_max_explicit(&f[1], float(t), r);
  atomic_fetch_min_explicit(&f[2], -float(t), r);
  atomic_fetch_sub_explicit(&f[3], 1.0f, r);
  atomic_fetch_add_explicit(&local[0], 1u, r);
  atomic_fetch_max_explicit(&local[1], l, r);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (l == 0) atomic_fetch_add_explicit(&u[8], atomic_load_explicit(&local[0], r) + atomic_load_explicit(&local[1], r), r);
}

kernel void rounding(const device half* h [[buffer(0)]], const device bfloat* b [[buffer(1)]],
    device half* ho [[buffer(2)]], device bfloat* bo [[buffer(3)]], uint t [[thread_position_in_grid]]) {
  const half x = h[3 * t], y = h[3 * t + 1], z = h[3 * t + 2];
  const bfloat p = b[3 * t], q = b[3 * t + 1], s = b[3 * t + 2];
  ho[3 * t] = x + y + z;
  ho[3 * t + 1] = x / y;
  ho[3 * t + 2] = half(float(x) * 1.37f);
  bo[3 * t] = p + q + s;
  bo[3 * t + 1] = p / q;
  bo[3 * t + 2] = bfloat(float(p) * 1.37f);
}
"""

# One SIMD group multiplies (8 M x 8 K) by (8 K x 8 N) and adds C.
MATRIX = """
template <typename A, typename B, typename C, typename D, int M, int N, int K>
[[kernel]] void multiply(const device A* a [[buffer(0)]], const device B* b [[buffer(1)]],
    const device C* c [[buffer(2)]], device D* d [[buffer(3)]]) {
  simdgroup_matrix<A, 8, 8> as[M][K];
  simdgroup_matrix<B, 8, 8> bs[K][N];
  for (int k = 0; k < K; ++k) {
    for (int m = 0; m < M; ++m) simdgroup_load(as[m][k], a + 64 * m * K + 8 * k, 8 * K);
    for (int n = 0; n < N; ++n) simdgroup_load(bs[k][n], b + 64 * k * N + 8 * n, 8 * N);
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      simdgroup_matrix<C, 8, 8> start;
      simdgroup_load(start, c + 64 * m * N + 8 * n, 8 * N);
      simdgroup_matrix<D, 8, 8> sum;
      simdgroup_multiply_accumulate(sum, as[m][0], bs[0][n], start);
      for (int k = 1; k < K; ++k) simdgroup_multiply_accumulate(sum, as[m][k], bs[k][n], sum);
      simdgroup_store(sum, d + 64 * m * N + 8 * n, 8 * N);
    }
}
kernel void diagonal(device float* out [[buffer(0)]], device float* transposed [[buffer(1)]]) {
  simdgroup_float8x8 m = simdgroup_float8x8(3.0f);
  simdgroup_store(m, out, 8);
  simdgroup_load(m, out + 64, 8, ulong2(0, 0), true);
  simdgroup_store(m, transposed, 8);
}
"""
MATRIX_TYPES = [
    ("float", "float", "float", "float"),
    ("half", "half", "float", "float"),
    ("bfloat", "bfloat", "float", "float"),
    ("half", "half", "half", "half"),
    ("bfloat", "bfloat", "bfloat", "bfloat"),
    ("half", "float", "float", "float"),
    ("float", "bfloat", "float", "float"),
    ("float", "half", "float", "float"),
    ("bfloat", "float", "float", "float"),
    ("half", "bfloat", "float", "half"),
]
MATRIX_SHAPES = [(1, 1, 1), (4, 2, 4), (3, 1, 3)]


def matrix_source() -> str:
    lines = [HEAD, MATRIX]
    for types in MATRIX_TYPES:
        for shape in MATRIX_SHAPES:
            arguments = ", ".join(map(str, (*types, *shape)))
            name = "_".join(map(str, ("multiply", *types, *shape)))
            lines.append(
                f'template [[host_name("{name}")]] [[kernel]] decltype(multiply<{arguments}>) multiply<{arguments}>;\n'
            )
    return "".join(lines)


def attention_source() -> str:
    instances = [
        (f"attention_{dtype}_{dim}", "attention", dtype, 32, keys, dim, dim, 4, 1, "bool", "float")
        for dtype in ENCODE
        for dim, keys in ((64, 32), (128, 16))
    ]
    return source(["steel/attn/kernels/steel_attention.h"], instances)


def attention_constants(queries: int, keys: int, block_k: int, causal: bool) -> dict:
    return {200: queries % 32 == 0, 201: keys % block_k == 0, 300: False, 301: causal, 302: False, 303: False}


def sources(metal: Path | None) -> dict[str, tuple[Source, dict]]:
    """Every file of the bundle with its function constants; without `metal`, those that need nothing of the project."""
    mlx = {"include_dirs": [include_dir()], "defines": {"MLX_METAL_JIT": 1}}
    vector = [(f"sdpa_{d}_{n}", "sdpa_vector", d, n) for d in ENCODE for n in (64, 128)]
    gemm = [(f"gemm_{d}", "gemm", d, 64, 64, 16, 2, 2, "false", "true") for d in ENCODE]
    gemm_text = source(["steel/utils.h", "steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h"], gemm)
    project = {}
    if metal is not None:
        silu = Source.load(metal / "metal" / "silu_gate" / "silu_gate.metal", [metal])
        project = {"silu_aligned": (silu, {0: True}), "silu_unaligned": (silu, {0: False})}
        for name, file, constants in (
            ("flash_forward", "flash_attention/forward", ATTENTION_CONSTANTS),
            ("flash_decode", "flash_attention/decode", ATTENTION_CONSTANTS),
            ("quantized_gemv", "quantized_matmul/gemv", QUANTIZED_CONSTANTS),
            ("quantized_plain", "quantized_matmul/plain", QUANTIZED_CONSTANTS),
            ("quantized_matmul", "quantized_matmul/matmul", QUANTIZED_CONSTANTS),
        ):
            text = Source.load(metal / "metal" / f"{file}.metal", [metal])
            used = {constant.index for constant in run_rewriter(text, run_preprocessor(text)).module.constants}
            project[name] = (text, {index: value for index, value in constants.items() if index in used})
    return {
        **project,
        "math": (Source.load(math_source()), {}),
        "groups": (Source.load(group_source()), {}),
        "groups_permuted": (
            Source.load(PERMUTED.join(["#include <metal_stdlib>\nusing namespace metal;\n", group_source()])),
            {},
        ),
        "positions": (Source.load(HEAD + POSITIONS), {}),
        "positions_permuted": (Source.load(HEAD + PERMUTED + POSITIONS), {}),
        "memory": (Source.load(HEAD + MEMORY), {}),
        "matrix": (Source.load(matrix_source()), {}),
        "sdpa_vector": (Source.load(source(["sdpa_vector.h"], vector), **mlx), dict.fromkeys(range(20, 26), False)),
        "attention_even": (Source.load(attention_source(), **mlx), attention_constants(64, 128, 32, False)),
        "attention_ragged": (Source.load(attention_source(), **mlx), attention_constants(45, 71, 32, True)),
        "gemm": (Source.load(gemm_text, **mlx), {10: False, 100: False, 110: False, 200: True, 201: True, 202: True}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--metal", type=Path, default=HERE.parents[2])
    parser.add_argument("--arch", default="sm_90")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, (text, constants) in sources(options.metal).items():
        module = compile_ptx(text, options.arch, constants)
        path = options.folder / f"{name}.ptx"
        path.write_text(module.text)
        path.with_suffix(".json").write_text(json.dumps(module.to_json(), indent=1))
        print(f"{path}: {len(module.kernels)} kernels")
    for script in ("run_ptx.py", "cuda_driver.py", "functions.py", "dtypes.py", "project_checks.py"):
        shutil.copy(HERE / script, options.folder)


if __name__ == "__main__":
    main()

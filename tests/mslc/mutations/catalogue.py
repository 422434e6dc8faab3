"""The seeded bugs: small edits of kernels, each with the finding that it must cause."""

from __future__ import annotations

from dataclasses import dataclass

SOFTMAX = "mlx/backend/metal/kernels/softmax.h"
SDPA = "mlx/backend/metal/kernels/sdpa_vector.h"
STEEL = "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"
STEEL_LOADER = "mlx/backend/metal/kernels/steel/attn/loader.h"
STEEL_MMA = "mlx/backend/metal/kernels/steel/attn/mma.h"
NAX = "mlx/backend/metal/kernels/steel/gemm/nax.h"
QUANTIZED_NAX = "mlx/backend/metal/kernels/quantized_nax.h"
ELEMENTWISE = "metal/common/elementwise.h"
STRIDED_PACK = "metal/common/strided_pack.h"
TILE = "metal/common/tile.h"
ATTENTION = "metal/flash_attention/"
FORWARD_OF_CODES, DECODE_OF_CODES = ATTENTION + "quantized_forward.metal", ATTENTION + "quantized_decode.metal"
STAGED_CODES = ATTENTION + "quantized_staging.h"
MATMUL = "metal/quantized_matmul/matmul.metal"
OURS = "kernels.metal"

STORE_SHARE = "*target(j, to, thread_index) = vectors[j];"
STORE_TILE = "*reinterpret_cast<threadgroup uint4*>(to + (row * kStride + column)) ="
STORE_ROW = "*reinterpret_cast<threadgroup metal::vec<float, kTogether>*>(row + first_column + e) ="
STORE_FOUR = "*reinterpret_cast<threadgroup Four*>(to + i) ="
LOAD_PAIR = "const Pair<T> pair = *reinterpret_cast<const threadgroup Pair<T>*>(from);"

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
WRONG = "wrong result"


@dataclass(frozen=True)
class Mutation:
    name: str
    launch: str  # in launches.LAUNCHES
    file: str
    old: str  # its first occurrence after `after` is replaced by `new`
    new: str
    kind: str  # of the finding; or WRONG, where the run has no finding but the result differs from the reference
    line: str = ""  # text of the line that the finding must name (either place of a race), in the changed file
    after: str = ""
    line_file: str = ""  # where that line is, if not in `file`


MUTATIONS = [
    # ---- threadgroup memory and its barriers
    Mutation(
        "barrier removed after the partial maxima",
        "softmax",
        SOFTMAX,
        f"    local_max[simd_group_id] = maxval;\n  }}\n  {BARRIER}",
        "    local_max[simd_group_id] = maxval;\n  }",
        "threadgroup race",
        "maxval = simd_max(local_max[simd_lane_id]);",
    ),
    Mutation(
        "barrier orders device memory instead of threadgroup memory",
        "softmax",
        SOFTMAX,
        BARRIER,
        "threadgroup_barrier(mem_flags::mem_device);",
        "threadgroup race",
        "local_normalizer[simd_group_id] = normalizer;",
        after="normalizer = simd_sum(normalizer);",
    ),
    Mutation(
        "barrier removed at the end of a loop",
        "sdpa_vector",
        SDPA,
        f"(o[i] / sum_exp_score);\n    {BARRIER}",
        "(o[i] / sum_exp_score);",
        "threadgroup race",
        "outputs[simd_lid * BD + simd_gid] = o[i];",
    ),
    Mutation(
        "keys used before all have been loaded",
        "steel_attention",
        STEEL,
        f"    Stile.clear();\n\n    {BARRIER}",
        "    Stile.clear();\n",
        "threadgroup race",
        "= T(0);",
        line_file=STEEL_LOADER,
    ),
    Mutation(
        "lanes of a SIMD group not ordered",
        "product",
        OURS,
        "    simdgroup_barrier(mem_flags::mem_threadgroup);\n    simdgroup_float8x8 x, y;",
        "    simdgroup_float8x8 x, y;",
        "threadgroup race",
        "simdgroup_load(x, left);",
    ),
    Mutation(
        "initialisation forgotten",
        "softmax",
        SOFTMAX,
        "local_max[simd_lane_id] = Limits<AccT>::min;",
        "",
        "uninitialised threadgroup memory",
        "maxval = simd_max(local_max[simd_lane_id]);",
    ),
    Mutation(
        "padding of a tile not zeroed",
        "steel_attention",
        STEEL_LOADER,
        "dst[i * kDstStrRow + j * kDstStrCol] = T(0);",
        "",
        "uninitialised threadgroup memory",
        after="struct BlockLoaderT",
    ),
    Mutation(
        "indices of a tile swapped",
        "transpose",
        OURS,
        "tile[16][17]",
        "tile[8][32]",
        "array out of bounds",
        "tile[lid.y][lid.x] = ",
    ),
    Mutation(
        "tile one column too narrow",
        "transpose",
        OURS,
        "threadgroup half tile[16][17];",
        "threadgroup half cells[15 * 16];\n  threadgroup half(*tile)[16] = (threadgroup half(*)[16])cells;",
        "threadgroup out of bounds",
        "tile[lid.y][lid.x] = ",
    ),
    Mutation(
        "too much threadgroup memory",
        "sdpa_vector",
        SDPA,
        "threadgroup U outputs[BN * BD];",
        "threadgroup U outputs[9 * BN * BD];",
        "threadgroup memory",
        "threadgroup U outputs",
    ),
    # ---- control flow
    Mutation(
        "barrier that some threads do not reach",
        "sdpa_vector",
        SDPA,
        BARRIER,
        f"if (simd_gid < 31) {BARRIER}",
        "barrier divergence",
        "if (simd_gid < 31)",
        after="sum_exp_scores[simd_gid] = sum_exp_score;",
    ),
    Mutation(
        "return before a barrier",
        "sdpa_vector",
        SDPA,
        "  // Each thread has a partial part",
        "  if (int(simd_gid) >= N) return;\n  // Each thread has a partial part",
        "barrier divergence",
        BARRIER,
    ),
    Mutation(
        "matrix product by half of a SIMD group",
        "product",
        OURS,
        "simdgroup_multiply_accumulate(sum, x, y, sum);",
        "if (lane < 16) simdgroup_multiply_accumulate(sum, x, y, sum);",
        "collective divergence",
        "simdgroup_multiply_accumulate",
    ),
    Mutation(
        "shuffle from lanes that took the other branch",
        "softmax",
        SOFTMAX,
        "  normalizer = simd_sum(normalizer);",
        "  if (simd_lane_id < 16) normalizer += simd_shuffle_xor(normalizer, 16);\n  normalizer = simd_sum(normalizer);",
        "collective divergence",
        "simd_shuffle_xor",
    ),
    Mutation(
        "loop that does not advance",
        "histogram",
        OURS,
        "i += groups * 64",
        "i += groups / 64",
        "step limit",
        "atomic_fetch_add_explicit(&local_counts[x[i]]",
    ),
    # ---- device memory
    Mutation(
        "bound off by one",
        "softmax",
        SOFTMAX,
        "lid * N_READS + N_READS <= axis_size",
        "lid * N_READS + N_READS <= axis_size + 1",
        "device out of bounds",
        "ld[i] = AccT(in[i]);",
    ),
    Mutation(
        "guard of the tail removed",
        "softmax",
        SOFTMAX,
        "if ((lid * N_READS + i) < axis_size) {",
        "{",
        "device race",
        "out[i] = T(ld[i] * normalizer);",
    ),
    Mutation(
        "full packs beyond the end",
        "silu_gate_flat",
        ELEMENTWISE,
        "const int count = kWhole ? int(kSize) : int(metal::min(long(kSize), size - at));",
        "const int count = kSize;",
        "device out of bounds",
        "reinterpret_cast<const device Raw*>(from)",
        line_file="metal/common/pack.h",
    ),
    Mutation(
        "reads past the last key",
        "steel_attention",
        STEEL,
        "      loader_k.load_safe(short2(BD, params->kL_rem));",
        "      loader_k.load_unsafe();",
        "device out of bounds",
        "src[i * src_ld + j]",
        line_file=STEEL_LOADER,
    ),
    Mutation(
        "vector load of unaligned data",
        "silu_gate_unaligned",
        STRIDED_PACK,
        "packs_are_aligned && count == Pack<T>::kSize",
        "count == Pack<T>::kSize",
        "misaligned access",
        "reinterpret_cast<const device Raw*>(from)",
        line_file="metal/common/pack.h",
    ),
    Mutation(
        "sum over threadgroups without atomics",
        "histogram",
        OURS,
        "atomic_fetch_add_explicit(&counts[lid], count, memory_order_relaxed);",
        "((device uint*)counts)[lid] += count;",
        "device race",
        "((device uint*)counts)[lid] += count;",
    ),
    Mutation(
        "strides of keys and values swapped",
        "sdpa_vector",
        SDPA,
        "simd_gid * v_seq_stride",
        "simd_gid * k_seq_stride",
        WRONG,
    ),
    # ---- variables of a thread
    Mutation(
        "local array too short",
        "silu_gate_flat",
        ELEMENTWISE,
        "float y[Op::kOutputs][Pack<T>::kSize];",
        "float y[Op::kOutputs][Pack<T>::kSize - 1];",
        "array out of bounds",
        "y[k][i] = out[k];",
    ),
    # ---- arithmetic that only the result shows
    Mutation(
        "reduction over four lanes",
        "softmax",
        SOFTMAX,
        "normalizer = simd_sum(normalizer);",
        "normalizer = quad_sum(normalizer);",
        WRONG,
    ),
    Mutation(
        "tile read transposed",
        "sdpa_vector",
        SDPA,
        "outputs[simd_gid * BD + simd_lid]",
        "outputs[simd_lid * BD + simd_gid]",
        WRONG,
    ),
    Mutation(
        "wrong matrix layout over the lanes",
        "steel_attention",
        STEEL_MMA,
        "const short fn = (qid & 2) * 2 + (simd_lane_id % 2) * 2;",
        "const short fn = (qid & 1) * 4 + (simd_lane_id % 2) * 2;",
        WRONG,
    ),
    Mutation(
        "runs of threadgroups overlap",
        "silu_gate_flat",
        ELEMENTWISE,
        "run * packs_per_run + thread_index",
        "run * threads + thread_index",
        WRONG,
    ),
    Mutation(
        "stride of the wrong axis",
        "silu_gate_strided",
        ELEMENTWISE,
        "index * params.strides[k][axis]",
        "index * params.strides[k][last]",
        "device out of bounds",
        "static_cast<float>(from[i * stride])",
        line_file=STRIDED_PACK,
    ),
    # ---- products on matrix units
    Mutation(
        "barrier removed before the product reads the weights",
        "quantized_matmul_nax",
        QUANTIZED_NAX,
        f"{BARRIER}\n\n        STEEL_PRAGMA_NO_UNROLL",
        "\n        STEEL_PRAGMA_NO_UNROLL",
        "threadgroup race",
        "dst[i * kElemCols + j] = static_cast<T>(src[r * str_x + c + j]);",
        line_file=NAX,
        after="loader_w.load_safe(short2(BK, tgp_bn));",
    ),
    Mutation(
        "rows beyond the matrix loaded",
        "quantized_matmul_nax",
        NAX,
        "if ((r < lx) && ((c + j) < ly)) {",
        "if ((c + j) < ly) {",
        "device out of bounds",
        "static_cast<T>(src[r * str_x + (c + j) * str_y]);",
        after="load_safe(",
    ),
    Mutation(
        "fragments of the right operand exchanged",
        "quantized_matmul_nax",
        NAX,
        "ct_b[i] = Bn0[i];\n      ct_b[kElemsPerFrag + i] = Bn1[i];",
        "ct_b[i] = Bn1[i];\n      ct_b[kElemsPerFrag + i] = Bn0[i];",
        WRONG,
    ),
    Mutation(
        "product taken as not transposed",
        "quantized_matmul_nax",
        NAX,
        "transpose_b,\n        true,\n        mpp::",
        "false,\n        true,\n        mpp::",
        WRONG,
    ),
    Mutation(
        "product run by some lanes",
        "quantized_matmul_nax",
        NAX,
        "gemm_op.run(ct_a, ct_b, ct_c);",
        "if (get_coord().x > 0) gemm_op.run(ct_a, ct_b, ct_c);",
        "collective divergence",
        "gemm_op.run(ct_a, ct_b, ct_c);",
    ),
    Mutation(
        "elements of another fragment set",
        "quantized_matmul_nax",
        NAX,
        "ct_a[i] = A[i];",
        "ct_a[kElemsPerFrag + i] = A[i];",
        "array out of bounds",
        "ct_a[kElemsPerFrag + i] = A[i];",
    ),
    # ---- vectors in arrays that promise less
    *(
        Mutation(
            f"alignas removed from {array} of {launch}",
            launch,
            file,
            f"alignas(16) threadgroup {array}[",
            f"threadgroup {array}[",
            "misaligned access",
            line,
            line_file=line_file,
        )
        for launch, file, array, line, line_file in (
            ("attention_forward", ATTENTION + "forward.metal", "T key_tiles", STORE_SHARE, TILE),
            ("attention_forward", ATTENTION + "forward.metal", "T value_tiles", STORE_SHARE, TILE),
            ("attention_backward_dq", ATTENTION + "backward_dq.metal", "T key_tiles", STORE_TILE, TILE),
            ("attention_backward_dq", ATTENTION + "backward_dq.metal", "T value_tiles", STORE_TILE, TILE),
            ("attention_backward_dkv", ATTENTION + "backward_dkv.metal", "T query_tiles", STORE_TILE, TILE),
            ("attention_backward_dkv", ATTENTION + "backward_dkv.metal", "T d_out_tiles", STORE_TILE, TILE),
            ("attention_decode", ATTENTION + "decode.metal", "float shares_out", STORE_ROW, ATTENTION + "decode.h"),
            ("attention_quantized_forward", FORWARD_OF_CODES, "T key_tiles", STORE_FOUR, STAGED_CODES),
            ("attention_quantized_forward", FORWARD_OF_CODES, "T value_tiles", STORE_FOUR, STAGED_CODES),
            ("attention_quantized_decode", DECODE_OF_CODES, "float shares_out", STORE_ROW, ATTENTION + "decode.h"),
            ("quantized_matmul_transposed", MATMUL, "float x_tile", STORE_TILE, TILE),
            ("quantized_matmul_plain", MATMUL, "float w_tile", LOAD_PAIR, TILE),
        )
    ),
]

// gated_delta and ssd_scan by chunks: adds up the parts of the gradients of q and k over the value
// heads that share a key head (chunk_keys.h).
//
// Kernels: gated_delta_chunk_sum_<dtype>.
// Grid: x covers steps and key heads, z batch rows and may be smaller than the batch. Threadgroup:
// 128 x 1 x 1; a SIMD group has a step and a key head, a lane four adjacent columns.
//
// Bindings: q, k, parts, d_q, d_k, params
// Function constants: 5, 8 as in state.h; 13: vectors of 16 bytes (chunk.h). Results are dense.
//
//   sum up the parts in their order; apply the gradient of the normalisation
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk_keys.h"
#include "metal/gated_delta/key_gradient.h"

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kDeltaSumSimdgroups)]] void gated_delta_chunk_sum(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device float* parts [[buffer(2)]],
    device T* d_q [[buffer(3)]],
    device T* d_k [[buffer(4)]],
    constant GatedDeltaParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int place = int(group.x) * kDeltaSumSimdgroups + int(simdgroup);
  const int step = place / params.key_heads, key_head = place % params.key_heads;
  const int key_dim = params.key_dim, column = 4 * int(lane);
  if (step >= params.length) {
    return;
  }
  const int count = params.token_parts / params.key_heads;
  const long size = chunk_part_size(params);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const long token = long(batch) * params.length + step;
    float4 q_own[kSumPacks], k_own[kSumPacks];
    read_key(q + batch * params.q_strides[0] + step * params.q_strides[1] +
                 key_head * params.q_strides[2],
             key_dim, lane, q_own);
    read_key(k + batch * params.k_strides[0] + step * params.k_strides[1] +
                 key_head * params.k_strides[2],
             key_dim, lane, k_own);
    float4 q_sums[kSumPacks] = {}, k_sums[kSumPacks] = {};
    if (column < key_dim) {
      const device float* part =
          parts + (token * params.token_parts + key_head * count) * size + column;
      MLX_ANVIL_NO_UNROLL
      for (int i = 0; i < count; ++i) {
        q_sums[0] += *reinterpret_cast<const device float4*>(part);
        k_sums[0] += *reinterpret_cast<const device float4*>(part + key_dim);
        part += size;
      }
    }
    const long to = (token * params.key_heads + key_head) * key_dim;
    store_key(q_own, params, params.q_scale, lane, q_sums, d_q + to);
    store_key(k_own, params, 1.0f, lane, k_sums, d_k + to);
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("gated_delta_chunk_sum_float32", gated_delta_chunk_sum<float>)
MLX_ANVIL_KERNEL("gated_delta_chunk_sum_float16", gated_delta_chunk_sum<half>)
MLX_ANVIL_KERNEL("gated_delta_chunk_sum_bfloat16", gated_delta_chunk_sum<bfloat>)

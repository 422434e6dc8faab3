// gated_delta and ssd_scan: adds up the parts of gradients (parts.h) over blocks of rows, and over
// the value heads that share a key head.
//
// Kernels: gated_delta_sum_<dtype>.
// Grid: x covers steps of the chunk and key heads, z batch rows and may be smaller than the batch.
// Threadgroup: 128 x 1 x 1; a SIMD group has a step and a key head, a lane four adjacent columns.
//
// Bindings: q, k, parts, d_q, d_k, d_g, d_beta, d_skip, params
// Function constants: 5, 8, 11 as in state.h; 13: vectors of 16 bytes (chunk.h). Results are dense.
// key_dim is a multiple of four.
//
//   sum up the parts in their order; apply the gradient of the normalisation
#include "metal/common/kernel.h"
#include "metal/gated_delta/key_gradient.h"
#include "metal/gated_delta/parts.h"

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kDeltaSumSimdgroups)]] void gated_delta_sum(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device float* parts [[buffer(2)]],
    device T* d_q [[buffer(3)]],
    device T* d_k [[buffer(4)]],
    device float* d_g [[buffer(5)]],
    device float* d_beta [[buffer(6)]],
    device float* d_skip [[buffer(7)]],
    constant GatedDeltaParams& params [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int place = int(group.x) * kDeltaSumSimdgroups + int(simdgroup);
  const int step = place / params.key_heads, key_head = place % params.key_heads;
  if (step >= params.steps) {
    return;
  }
  const int key_dim = params.key_dim;
  const long size = delta_part_size(part_vectors(), key_dim);
  for (int batch = int(group.z); batch < params.batch; batch += int(groups.z)) {
    const int t = params.first + step;
    const long token = long(batch) * params.length + t;
    const device T* const q_row =
        q + batch * params.q_strides[0] + t * params.q_strides[1] + key_head * params.q_strides[2];
    const device T* const k_row =
        k + batch * params.k_strides[0] + t * params.k_strides[1] + key_head * params.k_strides[2];
    float4 q_sums[kSumPacks] = {}, k_sums[kSumPacks] = {};
    float4 q_own[kSumPacks], k_own[kSumPacks];
    read_key(q_row, key_dim, lane, q_own);
    read_key(k_row, key_dim, lane, k_own);
    MLX_ANVIL_NO_UNROLL
    for (int head = key_head * params.group; head < (key_head + 1) * params.group; ++head) {
      const device float* const own = parts + part_of(params, batch, step, head) * size;
      const long gate = token * params.value_heads + head;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kSumPacks; ++i) {
        const int column = 128 * i + 4 * int(lane);
        if (column < key_dim) {
          float4 g_sum = float4(0.0f);
          MLX_ANVIL_NO_UNROLL
          for (int block = 0; block < params.blocks; ++block) {
            const device float* const part = own + block * size + column;
            q_sums[i] += *reinterpret_cast<const device float4*>(part);
            k_sums[i] += *reinterpret_cast<const device float4*>(part + key_dim);
            if (g_is_per_channel) {
              g_sum += *reinterpret_cast<const device float4*>(part + 2 * key_dim);
            }
          }
          if (g_is_per_channel) {
            *reinterpret_cast<device float4*>(d_g + gate * key_dim + column) = g_sum;
          }
        }
      }
      if (int(lane) < part_numbers()) {  // d_g of the head, d_beta, and d_skip
        float sum = 0.0f;
        MLX_ANVIL_NO_UNROLL
        for (int block = 0; block < params.blocks; ++block) {
          sum += own[(block + 1) * size - kDeltaPartNumbers + lane];
        }
        if (lane == 2) {
          d_skip[gate] = sum;
        } else if (lane == 1) {
          d_beta[gate] = sum;
        } else if (!g_is_per_channel) {
          d_g[gate] = sum;
        }
      }
    }
    const long to = (token * params.key_heads + key_head) * key_dim;
    store_key(q_own, params, params.q_scale, lane, q_sums, d_q + to);
    store_key(k_own, params, 1.0f, lane, k_sums, d_k + to);
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("gated_delta_sum_float32", gated_delta_sum<float>)
MLX_ANVIL_KERNEL("gated_delta_sum_float16", gated_delta_sum<half>)
MLX_ANVIL_KERNEL("gated_delta_sum_bfloat16", gated_delta_sum<bfloat>)

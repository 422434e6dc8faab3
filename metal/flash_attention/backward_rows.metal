// Row statistics of the backward of flash_attention, computed before the tiled passes:
//   delta  = rowsum(d_out out) - d_lse, or 0 for a row that sees no key
//   d_sink = -sum over queries of exp(sink - lse) delta
//
// Kernels: flash_attention_delta_<dtype>.
// Grid: (blocks of eight queries, query heads, batch). Threadgroup: 256, one simdgroup per query.
// Bindings: out, d_out, lse, d_lse, delta, params. Function constant 7: d_lse is read.
//
// Kernels: flash_attention_d_sinks.
// Grid: (query heads, batch). Threadgroup: 256.
// Bindings: sinks, lse, delta, d_sinks, params.
// Alignment: none is assumed.
//
//   delta:   each lane sums d_out out over every 32nd column; simd_sum; subtract d_lse;
//            0 where lse is -inf
//   d_sinks: each thread sums over every 256th query; reduce over the threadgroup
#include "metal/common/kernel.h"
#include "metal/flash_attention/backward.h"

enum { kRowsPerGroup = 8 };

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kRowsPerGroup)]] void flash_attention_delta(
    const device T* out [[buffer(0)]],
    const device T* d_out [[buffer(1)]],
    const device float* lse [[buffer(2)]],
    const device float* d_lse [[buffer(3)]],
    device float* delta [[buffer(4)]],
    constant AttentionBackwardParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int query = group.x * kRowsPerGroup + simdgroup, head = group.y, batch = group.z;
  if (query >= params.common.q_len) {
    return;
  }
  out +=
      batch * params.out_strides[0] + head * params.out_strides[1] + query * params.out_strides[2];
  d_out += batch * params.d_out_strides[0] + head * params.d_out_strides[1] +
           query * params.d_out_strides[2];
  float sum = 0.0f;
  for (int column = lane; column < params.common.v_head_dim; column += 32) {
    sum += static_cast<float>(out[column * params.out_strides[3]]) *
           static_cast<float>(d_out[column * params.d_out_strides[3]]);
  }
  sum = metal::simd_sum(sum);
  if (lane == 0) {
    const float of_lse =
        has_d_lse ? d_lse[batch * params.d_lse_strides[0] + head * params.d_lse_strides[1] +
                          query * params.d_lse_strides[2]]
                  : 0.0f;
    const long row =
        (static_cast<long>(batch) * params.common.q_heads + head) * params.common.q_len + query;
    // A row that sees no key often has an infinite d_lse, and 0 times it would be NaN.
    delta[row] = lse[row] == -INFINITY ? 0.0f : sum - of_lse;
  }
}

template <int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * kSimdgroups)]] void flash_attention_d_sinks(
    const device float* sinks [[buffer(0)]],
    const device float* lse [[buffer(1)]],
    const device float* delta [[buffer(2)]],
    device float* d_sinks [[buffer(3)]],
    constant AttentionBackwardParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[kSimdgroups];
  const int head = group.x, batch = group.y;
  const float sink =
      sinks[batch * params.common.sinks_strides[0] + head * params.common.sinks_strides[1]];
  const long first =
      (static_cast<long>(batch) * params.common.q_heads + head) * params.common.q_len;
  float sum = 0.0f;
  for (int query = thread_index; query < params.common.q_len; query += 32 * kSimdgroups) {
    sum -= metal::precise::exp(sink - lse[first + query]) * delta[first + query];
  }
  sum = metal::simd_sum(sum);
  if (lane == 0) {
    partial[simdgroup] = sum;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (thread_index == 0) {
    float total = 0.0f;
    for (int i = 0; i < kSimdgroups; ++i) {
      total += partial[i];
    }
    // A sink of -inf takes no part, and its sum is NaN where lse is -inf.
    d_sinks[batch * params.common.q_heads + head] = sink == -INFINITY ? 0.0f : total;
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("flash_attention_d_sinks", flash_attention_d_sinks<8>)
MLX_ANVIL_KERNEL("flash_attention_delta_float32", flash_attention_delta<float>)
MLX_ANVIL_KERNEL("flash_attention_delta_float16", flash_attention_delta<half>)
MLX_ANVIL_KERNEL("flash_attention_delta_bfloat16", flash_attention_delta<bfloat>)

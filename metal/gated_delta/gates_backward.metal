// Gradients of gated_delta_gates. With x = a + dt_bias and the slopes of gates.h:
//   d_a = d_x = d_g dg/dx              d_b = d_beta scale s (1 - s), s = sigmoid(b)
//   d_dt_bias = sum over rows of d_x   d_A_log = sum over rows and channels of d_g dg/dA_log
//
// Kernels: gated_delta_gates_backward_<dtype of a and b>, and gated_delta_gates_sum_<dtype of the
// sum>, which adds up the parts of d_dt_bias or of d_A_log. The order of summation is fixed.
// Grid: backward: linear_grid of parts of rows times blocks of 32 columns; threadgroup 256 x 1 x 1.
// sum: blocks of 32 columns; threadgroup 1024 x 1 x 1.
//
// Bindings:
//   backward: a, b, A_log, dt_bias, d_g, d_beta, d_a, d_b, bias_parts, log_parts, params
//   sum:      parts, sum, params
// Function constants: 0 to 2 in gates.h; 3: the sums are wanted, else no parts are written.
// Everything is dense; no alignment beyond the dtype's is assumed. bias_parts are [parts, columns],
// log_parts [parts, channels, heads]: the rows of both are added up.
//
//   each lane has a column, each SIMD group every eighth row of the part
//   for each row: d_a; that of a head's first channel also d_b; add to the sums
//   add up the sums of the SIMD groups; store a part of each
#include "metal/common/kernel.h"
#include "metal/common/sum_parts.h"
#include "metal/gated_delta/gates.h"

constant bool wants_sums [[function_constant(3)]];

enum { kGateThreads = kGateColumns * kGateSimdgroups };

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kGateThreads)]] void gated_delta_gates_backward(
    const device T* a [[buffer(0)]],
    const device T* b [[buffer(1)]],
    const device T* a_log [[buffer(2)]],
    const device T* dt_bias [[buffer(3)]],
    const device float* d_g [[buffer(4)]],
    const device float* d_beta [[buffer(5)]],
    device T* d_a [[buffer(6)]],
    device T* d_b [[buffer(7)]],
    device float* bias_parts [[buffer(8)]],
    device float* log_parts [[buffer(9)]],
    constant GatedDeltaGatesParams& params [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shares[2 * kGateThreads];
  const int columns = params.heads * params.channels;
  const int blocks = (columns + kGateColumns - 1) / kGateColumns;
  const long place = long(group.y) * groups.x + group.x, part = place / blocks;
  const long first = part * params.rows_per_part;
  if (first >= params.rows) {
    return;
  }
  const long last = metal::min(first + params.rows_per_part, long(params.rows));
  const int column = int(place - part * blocks) * kGateColumns + int(lane);
  const int head = column / params.channels, channel = column - head * params.channels;
  const bool exists = column < columns;
  float sum_of_x = 0.0f, sum_of_log = 0.0f;
  if (exists) {
    const GateColumn own = gate_column(a_log, dt_bias, head, column);
    for (long row = first + simdgroup; row < last; row += kGateSimdgroups) {
      const long at = row * columns + column;
      const Decay decay = decay_of(float(a[at]) + own.bias, own.speed, params);
      const float d_x = d_g[at] * decay.by_x;
      d_a[at] = static_cast<T>(d_x);
      sum_of_x += d_x;
      sum_of_log += d_g[at] * decay.by_log;
      if (channel == 0) {
        const long of_b = row * params.heads + head;
        const float slope = sigmoid_or_nan(float(b[of_b])).derivative;
        d_b[of_b] = static_cast<T>(d_beta[of_b] * (params.rate_scale * slope));
      }
    }
  }
  if (!wants_sums) {
    return;
  }
  const uint thread_index = simdgroup * kGateColumns + lane;
  shares[thread_index] = sum_of_x;
  shares[kGateThreads + thread_index] = sum_of_log;
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (simdgroup > 1 || !exists) {
    return;
  }
  const threadgroup float* const own_shares = shares + simdgroup * kGateThreads + lane;
  float total = 0.0f;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kGateSimdgroups; ++i) {
    total += own_shares[i * kGateColumns];
  }
  if (simdgroup == 0) {
    bias_parts[part * columns + column] = total;
  } else {
    log_parts[(part * params.channels + channel) * params.heads + head] = total;
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSumThreads)]] void gated_delta_gates_sum(
    const device float* parts [[buffer(0)]],
    device T* sum [[buffer(1)]],
    constant GatedDeltaGatesSumParams& params [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shares[kSumThreads];
  sum_parts(parts, params.parts, params.columns, sum, group.x, simdgroup, lane, shares);
}

// ---- kernels

#define INSTANTIATE(dtype, T)                                                           \
  MLX_ANVIL_KERNEL("gated_delta_gates_backward_" #dtype, gated_delta_gates_backward<T>) \
  MLX_ANVIL_KERNEL("gated_delta_gates_sum_" #dtype, gated_delta_gates_sum<T>)

INSTANTIATE(float32, float)
INSTANTIATE(float16, half)
INSTANTIATE(bfloat16, bfloat)

// moe_combine: the weighted sum of the rows of a token's pairs, plus a residual, plus a shared
// expert behind a gate. Sums are float32, in this order, and round once.
//   out[t] = sum over j of weights[t, j] * y[inverse[t, j]] + residual[t]
//            + sigmoid(gate[t]) * shared[t]
//
// Kernels: moe_combine_<dtype>.
// Bindings: see params.h.
// Grid: (blocks of packs of 16 bytes, tokens or fewer). Threadgroup: 32 to 256.
// Function constants: 0: rows are whole, aligned packs; 3 and 4 below, the others in
// rows.h. No other alignment is assumed.
//
//   for each token: for each 4 pairs, then each that is left:
//     load their places and weights, then their packs            (loads do not wait for sums)
//     add weight * pack, in order
//   add the other terms; store
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/moe/rows.h"

constant bool has_residual [[function_constant(3)]];
constant bool has_shared [[function_constant(4)]];

template <typename T>
METAL_FUNC void add_row(const device T* from, float factor, int count, thread float* sum) {
  float x[Pack<T>::kSize];
  load_columns<T>(from, count, x);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    sum[i] = metal::fma(x[i], factor, sum[i]);
  }
}

// Adds kCount pairs of a token, from `pair` on.
template <typename T, int kCount>
METAL_FUNC void add_pairs(const device T* y,
                          const device int* inverse,
                          const device uchar* weights,
                          long pair,
                          uint batch,
                          uint column,
                          int count,
                          constant MoeRowParams& params,
                          thread float* sum) {
  const device T* rows[kCount];
  float factors[kCount];
  MLX_ANVIL_UNROLL
  for (int s = 0; s < kCount; ++s) {
    rows[s] = y + row_of_pair(inverse, pair + s, batch, params) * params.columns + column;
    factors[s] = has_weights ? factor_at<T>(weights, weights_are_float32, pair + s) : 1.0f;
  }
  if (packs_are_aligned) {
    typename Pack<T>::Raw packs[kCount];
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kCount; ++s) {
      packs[s] = Pack<T>::read(rows[s]);
    }
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kCount; ++s) {
      float x[Pack<T>::kSize];
      Pack<T>::widen(packs[s], x);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < Pack<T>::kSize; ++i) {
        sum[i] = metal::fma(x[i], factors[s], sum[i]);
      }
    }
    return;
  }
  MLX_ANVIL_UNROLL
  for (int s = 0; s < kCount; ++s) {
    add_row<T>(rows[s], factors[s], count, sum);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void moe_combine(
    const device T* y [[buffer(0)]],
    const device int* inverse [[buffer(1)]],
    const device uchar* weights [[buffer(2)]],
    const device T* residual [[buffer(3)]],
    const device T* shared [[buffer(4)]],
    const device uchar* gate [[buffer(5)]],
    device T* out [[buffer(6)]],
    constant MoeRowParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  enum { kSize = Pack<T>::kSize };
  const uint column = (group.x * threads.x + thread_in_group.x) * kSize;
  if (column >= params.columns) {
    return;
  }
  const int count = metal::min(int(kSize), int(params.columns - column));
  for (uint token = group.y; token < params.tokens; token += groups.y) {
    const uint batch = batch_of(token, params);
    const long pair = static_cast<long>(token) * params.chosen;
    const long at = static_cast<long>(token) * params.columns + column;
    float sum[kSize] = {};
    uint j = 0;
    for (; j + kSlots <= params.chosen; j += kSlots) {
      add_pairs<T, kSlots>(y, inverse, weights, pair + j, batch, column, count, params, sum);
    }
    for (; j < params.chosen; ++j) {
      add_pairs<T, 1>(y, inverse, weights, pair + j, batch, column, count, params, sum);
    }
    if (has_residual) {
      add_row<T>(residual + at, 1.0f, count, sum);
    }
    if (has_shared) {
      float share = 1.0f;
      if (has_gate) {
        share = sigmoid(factor_at<T>(gate, gate_is_float32, token)).value;
      }
      add_row<T>(shared + at, share, count, sum);
    }
    store_columns<T>(out + at, count, sum);
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T) MLX_ANVIL_KERNEL("moe_combine_" #dtype, moe_combine<T>)

INSTANTIATE(float32, float)
INSTANTIATE(float16, half)
INSTANTIATE(bfloat16, bfloat)

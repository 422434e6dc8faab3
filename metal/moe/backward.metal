// The gradients of moe_combine, with c = d_out[t]:
//   d_y[inverse[t, j]] = weights[t, j] * c       d_weights[t, j] = c . y[inverse[t, j]]
//   d_shared[t] = s * c                          d_gate[t] = s (1 - s) (c . shared[t])
// with s = sigmoid(gate[t]). Each row is read once.
//
// Kernels: moe_backward_<dtype>.
// Bindings: see params.h.
// Grid: linear_grid of tokens, four to a threadgroup. Threadgroup: 128, one simdgroup per token.
// Function constants: 0: rows are whole, aligned packs; 1, 2, 5 and 6: rows.h. No other alignment
// is assumed. Sums are in a fixed order.
//
//   for each 4 pairs, then each that is left: for each pack of c of this lane:
//     for each pair: load its pack of y; add the products; store weight * c
//   sum over the lanes; store d_weights
//   the shared expert likewise, with its gate
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/moe/rows.h"

enum { kTokensPerThreadgroup = 4 };

// Writes factor * c, and adds the product of c and the row to the sum.
template <typename T>
METAL_FUNC float scaled_product(
    const thread float* c, const device T* row, device T* to, float factor, int count, float sum) {
  float x[Pack<T>::kSize];
  load_columns<T>(row, count, x);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    sum = metal::fma(c[i], x[i], sum);
    x[i] = c[i] * factor;
  }
  store_columns<T>(to, count, x);
  return sum;
}

// Stores the gradients of kCount pairs of a token, from `pair` on. `c` is its row of d_out.
template <typename T, int kCount>
METAL_FUNC void pair_gradients(const device T* c,
                               const device T* y,
                               const device int* inverse,
                               const device uchar* weights,
                               device T* d_y,
                               device uchar* d_weights,
                               long pair,
                               uint batch,
                               uint lane,
                               constant MoeRowParams& params) {
  enum { kSize = Pack<T>::kSize };
  const uint columns = params.columns;
  long rows[kCount];
  float factors[kCount], dots[kCount];
  MLX_ANVIL_UNROLL
  for (int s = 0; s < kCount; ++s) {
    rows[s] = row_of_pair(inverse, pair + s, batch, params) * columns;
    factors[s] = has_weights ? factor_at<T>(weights, weights_are_float32, pair + s) : 1.0f;
    dots[s] = 0.0f;
  }
  for (uint column = lane * kSize; column < columns; column += kLanes * kSize) {
    const int count = metal::min(int(kSize), int(columns - column));
    float of_c[kSize];
    load_columns<T>(c + column, count, of_c);
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kCount; ++s) {
      dots[s] = scaled_product<T>(of_c, y + rows[s] + column, d_y + rows[s] + column, factors[s],
                                  count, dots[s]);
    }
  }
  if (has_weights) {
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kCount; ++s) {
      const float sum = metal::simd_sum(dots[s]);
      if (lane == 0) {
        store_factor<T>(d_weights, weights_are_float32, pair + s, sum);
      }
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void moe_backward(
    const device T* d_out [[buffer(0)]],
    const device T* y [[buffer(1)]],
    const device int* inverse [[buffer(2)]],
    const device uchar* weights [[buffer(3)]],
    const device T* shared [[buffer(4)]],
    const device uchar* gate [[buffer(5)]],
    device T* d_y [[buffer(6)]],
    device uchar* d_weights [[buffer(7)]],
    device T* d_shared [[buffer(8)]],
    device uchar* d_gate [[buffer(9)]],
    constant MoeRowParams& params [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  enum { kSize = Pack<T>::kSize };
  const uint token = (group.y * groups.x + group.x) * kTokensPerThreadgroup + simdgroup;
  if (token >= params.tokens) {
    return;
  }
  const uint batch = batch_of(token, params), columns = params.columns;
  const long own = static_cast<long>(token) * columns;
  const long first = static_cast<long>(token) * params.chosen;
  uint j = 0;
  for (; j + kSlots <= params.chosen; j += kSlots) {
    pair_gradients<T, kSlots>(d_out + own, y, inverse, weights, d_y, d_weights, first + j, batch,
                              lane, params);
  }
  for (; j < params.chosen; ++j) {
    pair_gradients<T, 1>(d_out + own, y, inverse, weights, d_y, d_weights, first + j, batch, lane,
                         params);
  }
  if (has_gate) {
    const Sigmoid share = sigmoid(factor_at<T>(gate, gate_is_float32, token));
    float dot = 0.0f;
    for (uint column = lane * kSize; column < columns; column += kLanes * kSize) {
      const int count = metal::min(int(kSize), int(columns - column));
      float c[kSize];
      load_columns<T>(d_out + own + column, count, c);
      dot = scaled_product<T>(c, shared + own + column, d_shared + own + column, share.value, count,
                              dot);
    }
    dot = metal::simd_sum(dot);
    if (lane == 0) {
      store_factor<T>(d_gate, gate_is_float32, token, dot * share.value * share.complement);
    }
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T) MLX_ANVIL_KERNEL("moe_backward_" #dtype, moe_backward<T>)

INSTANTIATE(float32, float)
INSTANTIATE(float16, half)
INSTANTIATE(bfloat16, bfloat)

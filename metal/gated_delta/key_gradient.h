// The gradient of a row of q or k from that of its normalised form: what kernels that add up parts
// share. A lane has four adjacent columns.
#pragma once

#include "metal/gated_delta/chunk.h"

enum { kSumPacks = 2 };  // of 128 columns

template <typename T>
METAL_FUNC float4 load_four(const device T* from) {
  using Vector4 = metal::vec<T, 4>;
  return keys_are_vectors ? floats_of<T>(*reinterpret_cast<const device Vector4*>(from))
                          : float4(float(from[0]), float(from[1]), float(from[2]), float(from[3]));
}

// The gradient of a row that was normalised, from that of the normalised row. `own` is the row.
template <typename T>
METAL_FUNC void store_key(const thread float4 (&own)[kSumPacks],
                          constant GatedDeltaParams& params,
                          float scale,
                          uint lane,
                          const thread float4 (&sums)[kSumPacks],
                          device T* to) {
  float factor = 1.0f, shift = 0.0f;
  if (normalizes) {
    float squares = 0.0f, products = 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kSumPacks; ++i) {
      squares += metal::dot(own[i], own[i]);
      products += metal::dot(own[i], sums[i]);
    }
    const float root = metal::precise::rsqrt(metal::simd_sum(squares) + params.eps);
    factor = scale * root;
    shift = metal::simd_sum(products) * root * root;
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kSumPacks; ++i) {
    const int column = 128 * i + 4 * int(lane);
    const float4 result = (sums[i] - own[i] * shift) * factor;
    if (column < params.key_dim) {
      *reinterpret_cast<device metal::vec<T, 4>*>(to + column) =
          metal::vec<T, 4>(T(result.x), T(result.y), T(result.z), T(result.w));
    }
  }
}

// The lane's columns of a row. Only the gradient of the normalisation needs them.
template <typename T>
METAL_FUNC void read_key(const device T* row,
                         int key_dim,
                         uint lane,
                         thread float4 (&own)[kSumPacks]) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kSumPacks; ++i) {
    const int column = 128 * i + 4 * int(lane);
    own[i] = normalizes && column < key_dim ? load_four(row + column) : float4(0.0f);
  }
}

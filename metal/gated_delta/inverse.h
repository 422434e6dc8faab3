// (I + A)^-1 of a chunk in threadgroup memory, with A below the diagonal.
//
// Blocks of 16 on the diagonal by substitution, a column a lane; then those of 32 and 64 by
// products: the inverse of [[X, 0], [Z, Y]] is [[X', 0], [-Y' Z X', Y']].
#pragma once

#include "metal/gated_delta/decays.h"

// Replaces the block of 16 rows and columns at `block`, of which I + block is to be inverted.
METAL_FUNC void invert_by_substitution(threadgroup float* block, uint lane) {
  const int column = int(lane) % 16;
  float x[16];
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 16; ++i) {
    x[i] = i == column ? 1.0f : 0.0f;
    MLX_ANVIL_UNROLL
    for (int first = 0; first < i; first += 4) {
      const float4 four =
          *reinterpret_cast<const threadgroup float4*>(block + i * kDecayStride + first);
      MLX_ANVIL_UNROLL
      for (int l = first; l < first + 4; ++l) {
        if (l < i) {
          x[i] -= four[l - first] * x[l];
        }
      }
    }
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (lane < 16) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 16; ++i) {
      block[i * kDecayStride + column] = x[i];
    }
  }
}

// sum += left x right, both of float32: with pairs, as products of high and low parts.
template <typename T, bool kPairs>
struct WholeProduct {
  template <int kSize, int kColumns>
  METAL_FUNC static void add(thread RegTile<float, kSize, kColumns>& sum,
                             const thread RegTile<float, kSize, kSize>& left,
                             const thread RegTile<float, kSize, kColumns>& right) {
    sum.mma(left, right);
  }
};
template <typename T>
struct WholeProduct<T, true> {
  template <int kSize, int kColumns>
  METAL_FUNC static void add(thread RegTile<float, kSize, kColumns>& sum,
                             const thread RegTile<float, kSize, kSize>& left,
                             const thread RegTile<float, kSize, kColumns>& right) {
    const RegTile<T, kSize, kSize> left_high = left.template to<T>();
    const RegTile<T, kSize, kColumns> right_high = right.template to<T>();
    sum.mma(left_high, right_high);
    sum.mma(low_parts(left, left_high), right_high);
    sum.mma(left_high, low_parts(right, right_high));
  }
};

// The columns of a SIMD group of -Y' Z X' (above), of which Z has kSize rows and columns at
// `corner`. X' is above Z, and Y' right of it.
template <typename T, bool kPairs, int kSize, int kColumns>
METAL_FUNC RegTile<float, kSize, kColumns> corner_of_inverse(const threadgroup float* corner,
                                                             int column,
                                                             FragmentPlace place) {
  using Product = WholeProduct<T, kPairs>;
  RegTile<float, kSize, kSize> left;
  RegTile<float, kSize, kColumns> right, product, result;
  left.load(corner, kDecayStride, place);
  right.load(corner - kSize * kDecayStride + column, kDecayStride, place);
  product.zero();
  Product::add(product, left, right);
  left.load(corner + kSize, kDecayStride, place);
  result.zero();
  Product::add(result, left, product);
  result.negate();
  return result;
}

// Inverts I + A in threadgroup memory. All threads call it.
template <typename T, bool kPairs>
METAL_FUNC void invert(threadgroup float* matrix, uint simdgroup, uint lane) {
  const FragmentPlace place = fragment_place(lane);
  invert_by_substitution(matrix + 16 * simdgroup * (kDecayStride + 1), lane);
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (simdgroup % 2 == 1) {
    threadgroup float* const corner = matrix + 16 * simdgroup * kDecayStride + 16 * (simdgroup - 1);
    const RegTile<float, 16, 16> result = corner_of_inverse<T, kPairs, 16, 16>(corner, 0, place);
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    store_square(corner, result, place);
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  threadgroup float* const corner = matrix + 32 * kDecayStride;
  const int column = 8 * simdgroup;
  const RegTile<float, 32, 8> result = corner_of_inverse<T, kPairs, 32, 8>(corner, column, place);
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  store_square(corner + column, result, place);
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

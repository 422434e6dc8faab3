// Reductions over some lanes of a simdgroup, by exchanges.
#pragma once

#include <metal_stdlib>

#include "metal/common/unroll.h"

// Returns the maximum or the sum of x over the lanes that differ in bits from kFirst to kEnd.
template <bool kMaximum, int kFirst, int kEnd = 32>
METAL_FUNC float over_lanes(float x) {
  MLX_ANVIL_UNROLL
  for (int distance = kFirst; distance < kEnd; distance *= 2) {
    const float other = metal::simd_shuffle_xor(x, ushort(distance));
    x = kMaximum ? metal::fmax(x, other) : x + other;
  }
  return x;
}

// Packs of a run of elements that may end before the pack does, lie anywhere, or be apart.
#pragma once

#include <metal_stdlib>

#include "metal/common/pack.h"
#include "metal/common/unroll.h"

// Whether every full pack lies at a multiple of 16 bytes; otherwise elements move one by one.
constant bool packs_are_aligned [[function_constant(0)]];

// `count` elements, `stride` apart, widened; a full pack of neighbours in one load where it can be.
template <typename T>
METAL_FUNC void load_pack(const device T* from, long stride, int count, thread float* x) {
  if (packs_are_aligned && count == Pack<T>::kSize) {
    Pack<T>::load(from, x);
    return;
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    x[i] = i < count ? static_cast<float>(from[i * stride]) : 0.0f;
  }
}

template <typename T>
METAL_FUNC void store_pack(device T* to, int count, const thread float* x) {
  if (packs_are_aligned && count == Pack<T>::kSize) {
    Pack<T>::store(to, x);
    return;
  }
  // A fixed number of steps: x then stays in registers.
  MLX_ANVIL_UNROLL
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    if (i < count) {
      to[i] = static_cast<T>(x[i]);
    }
  }
}

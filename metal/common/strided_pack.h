// Loads and stores of packs that may be partial, unaligned or strided.
#pragma once

#include <metal_stdlib>

#include "metal/common/pack.h"
#include "metal/common/unroll.h"

// True if every full pack starts at a multiple of 16 bytes. Otherwise elements move one by one.
constant bool packs_are_aligned [[function_constant(0)]];

// Loads and widens `count` elements that lie `stride` apart. A full aligned pack is one vector
// load.
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
  // The trip count is constant so that x stays in registers.
  MLX_ANVIL_UNROLL
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    if (i < count) {
      to[i] = static_cast<T>(x[i]);
    }
  }
}

// Dense matrices as a format of dequant.h: a code is an element of x's dtype, and there are no
// scales. Rows have a multiple of 16 columns.
#pragma once

#include "metal/quantized_matmul/dequant.h"

// Kernels for quantized and for dense w take it as bytes.
METAL_FUNC const device uint* words_of(const device uchar* w) {
  return reinterpret_cast<const device uint*>(w);
}

// Elements 2 i and 2 i + 1 of words.
template <typename Element>
struct DensePair {
  METAL_FUNC static float2 get(const thread uint* words, int i) {
    return float2(as_type<metal::vec<Element, 2>>(words[i]));
  }
};

template <>
struct DensePair<float> {
  METAL_FUNC static float2 get(const thread uint* words, int i) {
    return float2(as_type<float>(words[2 * i]), as_type<float>(words[2 * i + 1]));
  }
};

template <typename Element>
struct DenseFormat {
  enum { kBits = 8 * sizeof(Element), kChunk = 16, kPart = 16, kHasBiases = 0 };
  template <typename T>
  using Scale = T;

  METAL_FUNC static void values(const thread uint* words, int piece, thread float* v) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float2 pair = DensePair<Element>::get(words, 4 * piece + i);
      v[2 * i] = pair.x;
      v[2 * i + 1] = pair.y;
    }
  }
  METAL_FUNC static float factor() { return 1.0f; }
  template <int kWords>
  METAL_FUNC static bool has_nan(const thread uint*) {
    return false;
  }
};

template <typename T>
METAL_FUNC float2 scale_and_bias(WeightRow<T, DenseFormat<T>>, int) {
  return float2(1.0f, 0.0f);
}

// What the kernels of moe_combine share: parts of rows, and numbers of float32 or of the rows'
// dtype. For kernel files only (see common/simd/simd.h).
#pragma once

#include "common/simd/math.h"
#include "common/simd/simd.h"
#include "moe/problem.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// A block of `count` elements; the lanes beyond them are 0.
template <class T>
inline Block load_part(const T* from, int64_t count) {
  if (count >= kBlock) {
    return load_block(from);
  }
  T padded[kBlock] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load_block(padded);
}

template <bool kStream, class T>
inline void store_part(T* to, int64_t count, Block x) {
  if (count >= kBlock) {
    store_block<kStream>(to, x);
    return;
  }
  T padded[kBlock];
  store_block<false>(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

template <class T>
inline float widened(T x) {
  T padded[kLanes] = {x};
  return load_lanes(padded)[0];
}
inline float widened(float x) {
  return x;
}

template <class T>
inline float factor_at(const MoeFactors& factors, int64_t i) {
  return factors.is_float32 ? static_cast<const float*>(factors.data)[i]
                            : widened(static_cast<const T*>(factors.data)[i]);
}

template <class T>
inline void store_factor(const MoeFactors& like, void* to, int64_t i, float x) {
  if (like.is_float32) {
    static_cast<float*>(to)[i] = x;
    return;
  }
  T lanes[kLanes];
  store_lanes(lanes, splat(x));
  static_cast<T*>(to)[i] = lanes[0];
}

struct Share {
  float value;       // s = 1 / (1 + e^-x)
  float complement;  // 1 - s, without cancellation
};

// NaN for NaN, unlike sigmoid(), and exact far below 0.
inline Share share_of(float gate) {
  const float small = exp(-absolute(splat(gate)))[0];
  const float major = 1.0f / (1.0f + small), minor = small * major;
  return gate < 0.0f ? Share{minor, major} : Share{major, minor};
}

// Streaming stores take whole, aligned vectors only.
template <class T>
inline bool rows_are_aligned(const T* rows, int64_t columns) {
  return reinterpret_cast<uintptr_t>(rows) % sizeof(f32v) == 0 &&
         columns * sizeof(T) % sizeof(f32v) == 0;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

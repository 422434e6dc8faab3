// Maps logits to order-preserving integers, with NaN above infinity and both zeros equal.
// Comparisons are then integer comparisons, and a key can be mapped back. For kernel files only
// (see simd.h).
#pragma once

#include "common/simd/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Below the key of every logit. The value leaves room for one number below it.
inline constexpr int32_t kNoKey = INT32_MIN + 1;
inline constexpr int32_t kKeyOfNan = INT32_MAX;

inline i32v splat_key(int32_t key) {
  return i32v{} + key;
}

inline i32v flipped(i32v bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline i32v keys_of(f32v logits) {
  const i32v bits = bits_as<i32v>(logits), keys = flipped(bits);
  const i32v ordered = keys == -1 ? i32v{} : keys;  // -1 is the key of -0
  return (bits & 0x7fffffff) > 0x7f800000 ? splat_key(kKeyOfNan) : ordered;
}

inline f32v logits_of(i32v keys) {
  return bits_as<f32v>(flipped(keys));
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

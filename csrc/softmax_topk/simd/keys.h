// Maps logits to order-preserving integers, with NaN above infinity and both zeros equal.
// Comparisons are then integer comparisons, and a key can be mapped back. For kernel files only
// (see simd.h).
#pragma once

#include "softmax_topk/simd/scores.h"

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

inline i32v larger(i32v a, i32v b) {
  return a > b ? a : b;
}

inline int32_t lane_max(i32v keys) {
  int32_t highest = keys[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    highest = keys[lane] > highest ? keys[lane] : highest;
  }
  return highest;
}

// Clears the lanes from `count` on.
inline i32v first_keys(i32v keys, int64_t count) {
  return bits_as<i32v>(first_lanes(splat(1.0f), count)) != 0 ? keys : splat_key(kNoKey);
}

// Returns the highest logit of a row. NaN ranks above all.
template <class T>
inline float highest_logit(const T* logits, int64_t experts) {
  i32v highest = splat_key(kNoKey);
  for_each_vector(experts, [&](int64_t i, int64_t count) {
    highest = larger(highest, first_keys(keys_of(load_some(logits + i, count)), count));
  });
  return logits_of(splat_key(lane_max(highest)))[0];
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

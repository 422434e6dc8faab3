// Loads of logit rows and the scores of chosen elements, for both CPU kernels of softmax_topk. For
// kernel files only (see simd.h).
#pragma once

#include "common/simd/math.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline int64_t padded(int64_t count) {
  return (count + kLanes - 1) / kLanes * kLanes;
}

// Calls body(first element, valid elements) for every vector of a row.
template <class Body>
inline void for_each_vector(int64_t count, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    body(i, static_cast<int64_t>(kLanes));
  }
  if (i < count) {
    body(i, count - i);
  }
}

// Loads `count` elements and pads the vector with zeros.
template <class T>
inline f32v load_some(const T* from, int64_t count) {
  if (count == kLanes) {
    return load_lanes(from);
  }
  T some[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    some[i] = from[i];
  }
  return load_lanes(some);
}

template <class T>
inline void store_some(T* to, int64_t count, f32v x) {
  if (count == kLanes) {
    store_lanes(to, x);
    return;
  }
  T some[kLanes];
  store_lanes(some, x);
  for (int64_t i = 0; i < count; ++i) {
    to[i] = some[i];
  }
}

// Clears the lanes from `count` on.
inline f32v first_lanes(f32v x, int64_t count) {
  int32_t lane[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    lane[i] = i;
  }
  return load_bits<i32v>(lane) < static_cast<int32_t>(count) ? x : f32v{};
}

// Scores are divided by e^reference, which keeps their sum from underflowing. The reference is 0
// for sigmoids that are not normalised.
template <class Args>
inline f32v reference_of(const Args& args, f32v highest) {
  if (!args.is_sigmoid) {
    return highest;
  }
  return args.is_normalised ? at_most(highest, 0.0f) : f32v{};
}

// e^logit or sigmoid(logit) = e^min(logit, 0) / (1 + e^-|logit|), divided by e^reference. NaN stays
// NaN.
inline f32v relative_score(bool is_sigmoid, f32v logit, f32v reference) {
  if (!is_sigmoid) {
    return exp(logit - reference);
  }
  return exp(at_most(logit, 0.0f) - reference) / (1.0f + exp(-absolute(logit)));
}

// Sums e^(logit - highest) over a row. Returns 0 or NaN if `highest` is NaN or infinite; the scores
// are NaN then.
template <class T>
inline float exponential_sum(const T* logits, int64_t experts, float highest) {
  f32v sum = {};
  for_each_vector(experts, [&](int64_t i, int64_t count) {
    const f32v some = load_some(logits + i, count);
    sum += first_lanes(exp_nonpositive<Accuracy::kFloat32>(some - highest), count);
  });
  return lane_sum(sum);
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// Loads of logit rows and the scores of chosen elements, for both CPU kernels of softmax_topk. For
// kernel files only (see simd.h).
#pragma once

#include "common/simd/math.h"
#include "softmax_topk/scoring.h"

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
// for other scores than softmax that are not normalised.
template <class Args>
inline f32v reference_of(const Args& args, f32v highest) {
  if (args.scoring == RouterScoring::kSoftmax) {
    return highest;
  }
  const float factor = args.scoring == RouterScoring::kSqrtSoftplus ? 0.5f : 1.0f;
  return args.is_normalised ? at_most(highest, 0.0f) * factor : f32v{};
}

inline f32v square_root(f32v x) {
#if defined(__AVX512F__)
  return bits_as<f32v>(_mm512_sqrt_ps(bits_as<__m512>(x)));
#elif defined(__AVX__)
  return bits_as<f32v>(_mm256_sqrt_ps(bits_as<__m256>(x)));
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    x[lane] = __builtin_sqrtf(x[lane]);
  }
  return x;
#endif
}

// sqrt(softplus(logit)) over e^reference, with softplus(logit) = max(logit, 0) + log(1 +
// e^-|logit|).
inline f32v relative_sqrt_softplus(f32v logit, f32v reference) {
  const f32v small = exp(-absolute(logit)), ratio = log1p_ratio(small);
  const f32v negative = exp(0.5f * logit - reference) * square_root(ratio);
  return logit > 0.0f ? square_root(logit + small * ratio) : negative;
}

// e^logit, sigmoid(logit) = e^min(logit, 0) / (1 + e^-|logit|), or sqrt(softplus(logit)), divided
// by e^reference. NaN stays NaN.
inline f32v relative_score(RouterScoring scoring, f32v logit, f32v reference) {
  if (scoring == RouterScoring::kSoftmax) {
    return exp(logit - reference);
  }
  if (scoring == RouterScoring::kSqrtSoftplus) {
    return relative_sqrt_softplus(logit, reference);
  }
  return exp(at_most(logit, 0.0f) - reference) / (1.0f + exp(-absolute(logit)));
}

// The derivative of the score's logarithm: 1, 1 - sigmoid(logit), computed as sigmoid(-logit),
// which does not cancel, or sigmoid(logit) / (2 softplus(logit)).
inline f32v log_slope(RouterScoring scoring, f32v logit) {
  if (scoring == RouterScoring::kSoftmax) {
    return splat(1.0f);
  }
  if (scoring == RouterScoring::kSigmoid) {
    return relative_score(scoring, -logit, f32v{});
  }
  const f32v small = exp(-absolute(logit)), ratio = log1p_ratio(small);
  const f32v softplus = logit > 0.0f ? logit + small * ratio : ratio;  // over small if negative
  return 0.5f / ((1.0f + small) * softplus);
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

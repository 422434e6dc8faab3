// Shared parts of the softmax_topk kernels. A simdgroup holds a row of logits as integer keys.
//
// A key is the bits of a logit, mapped to an integer of the same order. NaN sorts above infinity,
// and both zeros are equal. Comparisons are then integer comparisons, and a key converts back to
// its logit (every NaN to the same NaN).
//
// Lane l has elements l, l + 32, ... of a row, and holds kHeld of them in registers. That covers a
// row unless it is long; a long row is loaded again in every pass. Of the choices, lane l has
// numbers l and l + 32.
#pragma once

#include <metal_stdlib>

#include "metal/common/unroll.h"
#include "metal/softmax_topk/params.h"

constant bool is_sigmoid [[function_constant(0)]];     // else softmax or sqrtsoftplus
constant bool is_normalised [[function_constant(1)]];  // the weights of a row sum to 1
constant bool in_index_order [[function_constant(2)]];
constant bool row_is_long [[function_constant(3)]];
constant bool is_sqrtsoftplus [[function_constant(6)]];  // 4 and 5: steering.h

// The host defines the same values.
enum { kLanes = 32, kRowsPerThreadgroup = 8, kThreads = kLanes * kRowsPerThreadgroup };
enum { kSlots = 2, kMostChosen = kLanes * kSlots };

constant int kNoKey = -0x7fffffff - 1;  // below the key of any logit

METAL_FUNC int flipped(int bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

METAL_FUNC int key_of(float logit) {
  const int bits = as_type<int>(logit), key = flipped(bits);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return is_nan ? 0x7fffffff : key == -1 ? 0 : key;  // -1 is the key of -0
}

METAL_FUNC float logit_of(int key) {
  return as_type<float>(flipped(key));
}

METAL_FUNC uint row_of(uint3 group, uint3 groups, uint simdgroup) {
  return (group.y * groups.x + group.x) * kRowsPerThreadgroup + simdgroup;
}

// The part of a row that a simdgroup holds in registers.
template <typename T, int kHeld>
struct HeldKeys {
  int keys[kHeld];
  uint first;  // index in the row of lane 0's first element

  METAL_FUNC uint element(int i, uint lane) const thread { return first + i * kLanes + lane; }

  // Sets keys past the end of the row to kNoKey.
  METAL_FUNC void load(const device T* row, uint begin, uint experts, uint lane) thread {
    first = begin;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const uint at = element(i, lane);
      keys[i] = at < experts ? key_of(static_cast<float>(row[at])) : kNoKey;
    }
  }

  // Loads the elements from `begin` on. A row that is not long is already in registers.
  METAL_FUNC void move_to(const device T* row, uint begin, uint experts, uint lane) thread {
    if (row_is_long) {
      load(row, begin, experts, lane);
    }
  }
};

// Returns the largest key of the row, equal in all lanes.
template <typename T, int kHeld>
METAL_FUNC int highest_key(const device T* row,
                           constant SoftmaxTopkParams& params,
                           uint lane,
                           thread HeldKeys<T, kHeld>& held) {
  int highest = kNoKey;
  for (uint begin = 0; begin < params.experts; begin += kLanes * kHeld) {
    held.move_to(row, begin, params.experts, lane);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      highest = metal::max(highest, held.keys[i]);
    }
  }
  return metal::simd_max(highest);
}

// Returns this lane's share of the row's sum of e^(logit - highest).
template <typename T, int kHeld>
METAL_FUNC float exponential_sum(const device T* row,
                                 constant SoftmaxTopkParams& params,
                                 uint lane,
                                 float highest,
                                 thread HeldKeys<T, kHeld>& held) {
  float sum = 0.0f;
  for (uint begin = 0; begin < params.experts; begin += kLanes * kHeld) {
    held.move_to(row, begin, params.experts, lane);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const float e = metal::precise::exp(logit_of(held.keys[i]) - highest);
      sum += held.keys[i] == kNoKey ? 0.0f : e;
    }
  }
  return sum;
}

METAL_FUNC bool is_softmax() {
  return !is_sigmoid && !is_sqrtsoftplus;
}

// Returns log(1 + t) / t for 0 <= t <= 1, from the series of artanh(z) / z with z = t / (2 + t).
// csrc/softmax_topk/simd/scores.h computes the same.
METAL_FUNC float log1p_ratio(float t) {
  const float z = t / (2.0f + t), square = z * z;
  float p = 1.0f / 13.0f;
  p = metal::fma(p, square, 1.0f / 11.0f);
  p = metal::fma(p, square, 1.0f / 9.0f);
  p = metal::fma(p, square, 1.0f / 7.0f);
  p = metal::fma(p, square, 1.0f / 5.0f);
  p = metal::fma(p, square, 1.0f / 3.0f);
  p = metal::fma(p, square, 1.0f);
  return 2.0f / (2.0f + t) * p;
}

// Returns the score over e^reference, which prevents underflow. The score is e^logit,
// sigmoid(logit) = e^min(logit, 0) / (1 + e^-|logit|), or sqrt(softplus(logit)) with
// softplus(logit) = max(logit, 0) + log(1 + e^-|logit|). The ternary keeps NaN, which metal::min
// would drop.
METAL_FUNC float relative_score(float logit, float reference) {
  if (is_softmax()) {
    return metal::precise::exp(logit - reference);
  }
  const float small = metal::precise::exp(-metal::fabs(logit));
  if (is_sqrtsoftplus) {
    const float ratio = log1p_ratio(small);
    return logit > 0.0f
               ? metal::precise::sqrt(logit + small * ratio)
               : metal::precise::exp(0.5f * logit - reference) * metal::precise::sqrt(ratio);
  }
  const float exponent = logit > 0.0f ? 0.0f : logit;
  return metal::precise::exp(exponent - reference) / (1.0f + small);
}

// Returns the exponent by which a row's scores are scaled. Scores other than softmax have none if
// they are not normalised.
METAL_FUNC float reference_of(float highest) {
  if (is_softmax()) {
    return highest;
  }
  const float exponent = is_sqrtsoftplus ? 0.5f * highest : highest;
  return !is_normalised || highest > 0.0f ? 0.0f : exponent;
}

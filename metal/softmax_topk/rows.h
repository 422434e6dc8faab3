// What the softmax_topk kernels share: a SIMD group's row of logits as keys, and its choices.
//
// A key is a logit's bits as an integer of the same order: NaN above infinity, the two zeros equal.
// So comparisons are of integers, and a key gives its logit back (whatever NaN it was).
//
// Lane l has the elements l, l + 32, ... of a row, kHeld of them in registers, which is all of a
// row that is not long; a long row is read again for every pass over it. Of what was chosen it has
// the numbers l and l + 32.
#pragma once

#include <metal_stdlib>

#include "metal/common/unroll.h"
#include "metal/softmax_topk/params.h"

constant bool is_sigmoid [[function_constant(0)]];     // otherwise softmax
constant bool is_normalised [[function_constant(1)]];  // weights of a row sum to 1
constant bool in_index_order [[function_constant(2)]];
constant bool row_is_long [[function_constant(3)]];

// The host knows all of them.
enum { kLanes = 32, kRowsPerThreadgroup = 8, kThreads = kLanes * kRowsPerThreadgroup };
enum { kSlots = 2, kMostChosen = kLanes * kSlots };

constant int kNoKey = -0x7fffffff - 1;  // below that of any logit

METAL_FUNC int flipped(int bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

METAL_FUNC int key_of(float logit) {
  const int bits = as_type<int>(logit), key = flipped(bits);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return is_nan ? 0x7fffffff : key == -1 ? 0 : key;  // -1: that of -0
}

METAL_FUNC float logit_of(int key) {
  return as_type<float>(flipped(key));
}

METAL_FUNC uint row_of(uint3 group, uint3 groups, uint simdgroup) {
  return (group.y * groups.x + group.x) * kRowsPerThreadgroup + simdgroup;
}

// The part of a row that a SIMD group has in registers.
template <typename T, int kHeld>
struct HeldKeys {
  int keys[kHeld];
  uint first;  // element of the row

  METAL_FUNC uint element(int i, uint lane) const thread { return first + i * kLanes + lane; }

  // kNoKey beyond the end.
  METAL_FUNC void load(const device T* row, uint begin, uint experts, uint lane) thread {
    first = begin;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const uint at = element(i, lane);
      keys[i] = at < experts ? key_of(static_cast<float>(row[at])) : kNoKey;
    }
  }

  // The elements from `begin` on, which are there already where the row is not long.
  METAL_FUNC void move_to(const device T* row, uint begin, uint experts, uint lane) thread {
    if (row_is_long) {
      load(row, begin, experts, lane);
    }
  }
};

// This lane's share of a row's sum of e^(logit - highest).
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

// The score of a logit over e^reference, which keeps it from underflowing: e^logit, or
// sigmoid(logit) = e^min(logit, 0) / (1 + e^-|logit|). NaN stays NaN (metal::min drops it).
METAL_FUNC float relative_score(float logit, float reference) {
  if (!is_sigmoid) {
    return metal::precise::exp(logit - reference);
  }
  const float exponent = logit > 0.0f ? 0.0f : logit;
  const float small = metal::precise::exp(-metal::fabs(logit));
  return metal::precise::exp(exponent - reference) / (1.0f + small);
}

// What a row's scores are taken over e to the power of; 0 for a sigmoid as it is.
METAL_FUNC float reference_of(float highest) {
  if (!is_sigmoid) {
    return highest;
  }
  return !is_normalised || highest > 0.0f ? 0.0f : highest;
}

// The choice by score plus bias, and within the best groups, for softmax_topk's forward kernel.
//
// Element e belongs to group e / group_size. The score of a group is that of its best expert, or
// the sum of its two best, each plus its bias. Of equal groups the lowest ranks first. Lane g holds
// the score of group g.
#pragma once

#include "metal/softmax_topk/rows.h"

constant bool has_bias [[function_constant(4)]];
constant bool has_groups [[function_constant(5)]];  // and fewer are kept than there are

// What turns a row's logits into the keys that rank its experts.
struct Steering {
  const device float* bias;
  float reference, sum;  // of the scores
  uint kept;             // a bit for each group

  METAL_FUNC float score(float logit) const thread {
    return relative_score(logit, reference) / sum;
  }

  // The score, plus its bias, of the expert with this key.
  METAL_FUNC float value(int key) const thread {
    return has_bias ? logit_of(key) : score(logit_of(key));
  }

  // Replaces the keys of logits. Without a bias the logits themselves rank the experts.
  template <typename T, int kHeld>
  METAL_FUNC void rank(constant SoftmaxTopkParams& params,
                       uint lane,
                       thread HeldKeys<T, kHeld>& held) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const uint at = held.element(i, lane);
      if (has_bias && at < params.experts) {
        held.keys[i] = key_of(score(logit_of(held.keys[i])) + bias[at]);
      }
    }
  }

  template <typename T, int kHeld>
  METAL_FUNC void mask(constant SoftmaxTopkParams& params,
                       uint lane,
                       thread HeldKeys<T, kHeld>& held) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const uint at = held.element(i, lane);
      if (has_groups && at < params.experts && !(kept >> (at / params.group_size) & 1)) {
        held.keys[i] = params.masked_key;
      }
    }
  }

  // Loads the keys of the elements from `begin` on. A row that is not long is already there.
  template <typename T, int kHeld>
  METAL_FUNC void move_to(const device T* row,
                          uint begin,
                          constant SoftmaxTopkParams& params,
                          uint lane,
                          thread HeldKeys<T, kHeld>& held) const thread {
    held.move_to(row, begin, params.experts, lane);
    if (row_is_long) {
      rank<T, kHeld>(params, lane, held);
      mask<T, kHeld>(params, lane, held);
    }
  }
};

// Returns the key of a group's score, equal in all lanes.
template <typename T, int kHeld>
METAL_FUNC int group_key(uint group,
                         const device T* row,
                         constant SoftmaxTopkParams& params,
                         uint lane,
                         const thread Steering& steering,
                         thread HeldKeys<T, kHeld>& held) {
  int first = kNoKey, second = kNoKey;  // the largest keys of this lane
  for (uint begin = 0; begin < params.experts; begin += kLanes * kHeld) {
    steering.move_to<T, kHeld>(row, begin, params, lane, held);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const uint distance = held.element(i, lane) - group * params.group_size;  // wraps below it
      const int key = distance < params.group_size ? held.keys[i] : kNoKey;
      second = metal::max(second, metal::min(first, key));
      first = metal::max(first, key);
    }
  }
  const int best = metal::simd_max(first);
  if (params.groups_by_max) {
    return best;
  }
  const uint owner = metal::simd_min(first == best ? lane : static_cast<uint>(kLanes));
  const int next = metal::simd_max(lane == owner ? second : first);
  return key_of(steering.value(best) + steering.value(next));
}

// Returns a bit for each group that is kept, equal in all lanes.
template <typename T, int kHeld>
METAL_FUNC uint kept_groups(const device T* row,
                            constant SoftmaxTopkParams& params,
                            uint lane,
                            const thread Steering& steering,
                            thread HeldKeys<T, kHeld>& held) {
  int mine = kNoKey;
  for (uint group = 0; group < params.groups; ++group) {
    const int key = group_key<T, kHeld>(group, row, params, lane, steering, held);
    mine = lane == group ? key : mine;
  }
  uint better = 0;
  for (uint group = 0; group < params.groups; ++group) {
    const int other = metal::simd_shuffle(mine, static_cast<ushort>(group));
    better += other > mine || (other == mine && group < lane) ? 1u : 0u;
  }
  const bool is_kept = lane < params.groups && better < params.kept_groups;
  return metal::simd_or(is_kept ? 1u << lane : 0u);
}

// Turns the logits' keys in `held` into those that rank the experts.
template <typename T, int kHeld>
METAL_FUNC Steering steer(const device T* row,
                          const device float* bias,
                          constant SoftmaxTopkParams& params,
                          uint lane,
                          thread HeldKeys<T, kHeld>& held) {
  Steering steering;
  steering.bias = bias;
  steering.reference = 0.0f;
  steering.sum = 1.0f;
  steering.kept = 0xffffffffu;
  if (is_softmax()) {
    steering.reference = logit_of(highest_key<T, kHeld>(row, params, lane, held));
    steering.sum =
        metal::simd_sum(exponential_sum<T, kHeld>(row, params, lane, steering.reference, held));
  }
  if (row_is_long) {
    steering.kept = has_groups ? kept_groups<T, kHeld>(row, params, lane, steering, held) : 0;
    return steering;
  }
  steering.rank<T, kHeld>(params, lane, held);
  if (has_groups) {
    steering.kept = kept_groups<T, kHeld>(row, params, lane, steering, held);
    steering.mask<T, kHeld>(params, lane, held);
  }
  return steering;
}

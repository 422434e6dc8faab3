// The choice by score plus bias, and within the best groups, on the CPU, as
// metal/softmax_topk/steering.h defines it. For kernel files only (see simd.h).
#pragma once

#include "softmax_topk/simd/choose.h"
#include "softmax_topk/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline constexpr int64_t kMostGroups = 32;  // checked in primitive.cpp

// Turns the keys of a row's logits into those that rank its experts.
class Steering {
 public:
  Steering(const RouterForwardArgs& args, const ChoiceMemory& memory, int64_t row)
      : args_(args), keys_(memory.keys), bias_(args.bias) {
    if (bias_) {
      bias_ += row / args.rows_per_bias * args.experts;
    }
  }

  // `logits`: of the row, for the sum of a softmax.
  template <class T>
  void run(const T* logits) {
    if (args_.scoring == RouterScoring::kSoftmax) {
      reference_ = highest_logit(logits, args_.experts);
      sum_ = exponential_sum(logits, args_.experts, reference_);
    }
    if (bias_) {
      add_bias();
    }
    if (args_.groups > 1) {
      mask_groups();
    }
  }

 private:
  f32v scores_of(f32v logits) const {
    return relative_score(args_.scoring, logits, splat(reference_)) / splat(sum_);
  }

  void add_bias() {
    for_each_vector(args_.experts, [&](int64_t i, int64_t count) {
      const f32v scores = scores_of(logits_of(load_bits<i32v>(keys_ + i)));
      const i32v ranking = first_keys(keys_of(scores + load_some(bias_ + i, count)), count);
      std::memcpy(keys_ + i, &ranking, sizeof(ranking));
    });
  }

  void mask_groups() {
    const int64_t size = args_.experts / args_.groups;
    int32_t ranking[kMostGroups];
    for (int64_t group = 0; group < args_.groups; ++group) {
      ranking[group] = key_of_group(keys_ + group * size, size);
    }
    for (int64_t group = 0; group < args_.groups; ++group) {
      int64_t better = 0;
      for (int64_t other = 0; other < args_.groups; ++other) {
        better +=
            ranking[other] > ranking[group] || (ranking[other] == ranking[group] && other < group);
      }
      for (int64_t i = 0; better >= args_.kept_groups && i < size; ++i) {
        keys_[group * size + i] = args_.masked_key;
      }
    }
  }

  int32_t key_of_group(const int32_t* keys, int64_t size) const {
    i32v first = splat_key(kNoKey), second = first;
    for_each_vector(size, [&](int64_t i, int64_t count) {
      // Reads past the group, but not past the scratch memory.
      const i32v some = first_keys(load_bits<i32v>(keys + i), count);
      second = larger(second, some > first ? first : some);
      first = larger(first, some);
    });
    int32_t best = kNoKey, next = kNoKey;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int32_t mine = first[lane], below = mine > best ? best : mine;
      next = next > below ? next : below;
      next = next > second[lane] ? next : second[lane];
      best = best > mine ? best : mine;
    }
    if (args_.groups_by_max) {
      return best;
    }
    const f32v values = values_of(splat_key(best)) + values_of(splat_key(next));
    return keys_of(values)[0];
  }

  // The score, plus its bias, of experts with these keys.
  f32v values_of(i32v keys) const { return bias_ ? logits_of(keys) : scores_of(logits_of(keys)); }

  const RouterForwardArgs& args_;
  int32_t* const keys_;
  const float* bias_;
  float reference_ = 0.0f, sum_ = 1.0f;
};

// Replaces the keys of the chosen experts by those of their logits, and returns the highest of
// these; of the whole row if the weights are its softmax.
template <class T>
inline f32v take_logits(const RouterForwardArgs& args,
                        const ChoiceMemory& memory,
                        const T* logits) {
  T* const chosen = reinterpret_cast<T*>(memory.candidates);
  for (int64_t i = 0; i < args.chosen; ++i) {
    chosen[i] = logits[memory.chosen_indices[i]];
  }
  i32v highest = splat_key(kNoKey);
  for_each_vector(args.chosen, [&](int64_t i, int64_t count) {
    const i32v keys = first_keys(keys_of(load_some(chosen + i, count)), count);
    std::memcpy(memory.chosen_keys + i, &keys, sizeof(keys));
    highest = larger(highest, keys);
  });
  if (args.scoring == RouterScoring::kSoftmax && !args.is_normalised) {
    return splat(highest_logit(logits, args.experts));
  }
  return logits_of(splat_key(lane_max(highest)));
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

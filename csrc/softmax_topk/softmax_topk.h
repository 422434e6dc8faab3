// The op function softmax_topk. Formulas: the docstring in python.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "mlx/mlx.h"
#include "softmax_topk/scoring.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// How the score of a group of experts follows from those of its experts.
enum class GroupScoring { kSumOfTwo, kMax };

// Options of softmax_topk, as in Python.
struct RouterOptions {
  int64_t chosen = 0;  // `k` in Python
  RouterScoring scoring = RouterScoring::kSoftmax;
  bool norm = true;
  bool sorted = true;
  float scale = 1.0f;       // `routed_scaling_factor`
  int64_t groups = 1;       // `n_group`
  int64_t kept_groups = 1;  // `topk_group`
  GroupScoring group_scoring = GroupScoring::kSumOfTwo;
  bool masks_with_zero = false;  // `masked_score` is 0, otherwise -inf
  bool has_bias = false;         // set by the op function

  bool has_groups() const { return kept_groups < groups; }

  // Returns true if the largest logit of a row may not be among the chosen ones.
  bool is_steered() const { return has_bias || has_groups(); }

  bool operator==(const RouterOptions&) const = default;
};

// Returns weights in the dtype of the logits, and uint32 indices; both [..., chosen].
std::pair<mx::array, mx::array> softmax_topk(const mx::array& logits,
                                             const std::optional<mx::array>& bias,
                                             RouterOptions options,
                                             mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

// The op function softmax_topk. Formulas: the docstring in python.cpp.
#pragma once

#include <cstdint>
#include <utility>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

enum class RouterScoring { kSoftmax, kSigmoid };

// Options of softmax_topk, as in Python.
struct RouterOptions {
  int64_t chosen = 0;  // `k` in Python
  RouterScoring scoring = RouterScoring::kSoftmax;
  bool norm = true;
  bool sorted = true;

  bool operator==(const RouterOptions&) const = default;
};

// Returns weights in the dtype of the logits, and uint32 indices; both [..., chosen].
std::pair<mx::array, mx::array> softmax_topk(const mx::array& logits,
                                             const RouterOptions& options,
                                             mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

#pragma once

#include <cstdint>
#include <utility>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

enum class RouterScoring { kSoftmax, kSigmoid };

// Formulas and rules: arguments.cpp.
struct RouterOptions {
  int64_t chosen = 0;  // the k of Python
  RouterScoring scoring = RouterScoring::kSoftmax;
  bool norm = true;
  bool sorted = true;

  bool operator==(const RouterOptions&) const = default;
};

// Weights, of the dtype of the logits, and indices, uint32; each [..., chosen].
std::pair<mx::array, mx::array> softmax_topk(const mx::array& logits,
                                             const RouterOptions& options,
                                             mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

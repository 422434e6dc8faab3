#pragma once

#include "common/primitive.h"
#include "softmax_topk/softmax_topk.h"

namespace mlx_anvil {

inline constexpr const char* kSoftmaxTopk = "softmax_topk";

// Throws where a row of `shape` has not so many to choose.
void require_chosen(const RouterOptions& options, const mx::Shape& shape);

// Adds the kernel to the graph, or its composition where there is none. Gives weights and indices.
Arrays apply_softmax_topk(const RouterOptions& options, const mx::array& logits, mx::Stream stream);

// The gradient in the logits, for the indices that the forward gave.
mx::array apply_softmax_topk_backward(const RouterOptions& options,
                                      const mx::array& logits,
                                      const mx::array& indices,
                                      const mx::array& d_weights,
                                      mx::Stream stream);

}  // namespace mlx_anvil

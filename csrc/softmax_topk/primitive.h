// softmax_topk as graph nodes. Called by the op function (softmax_topk.cpp).
#pragma once

#include "common/primitive.h"
#include "softmax_topk/softmax_topk.h"

namespace mlx_anvil {

inline constexpr const char* kSoftmaxTopk = "softmax_topk";

// Throws if the options do not fit the last axis of `shape`: fewer than options.chosen elements, or
// groups of other sizes.
void require_chosen(const RouterOptions& options, const mx::Shape& shape);

// Adds the kernel to the graph, or its composition if no kernel serves. Inputs: logits[, bias in
// float32]; a bias has the last axis of the logits, under vmap after leading axes of the logits.
// Returns weights and indices.
Arrays apply_softmax_topk(const RouterOptions& options, Arrays inputs, mx::Stream stream);

// Returns the gradient in the logits for the indices that the forward returned.
mx::array apply_softmax_topk_backward(const RouterOptions& options,
                                      const mx::array& logits,
                                      const mx::array& indices,
                                      const mx::array& d_weights,
                                      mx::Stream stream);

}  // namespace mlx_anvil

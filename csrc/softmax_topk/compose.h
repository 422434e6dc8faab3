// softmax_topk in MLX ops.
#pragma once

#include "common/primitive.h"
#include "softmax_topk/softmax_topk.h"

namespace mlx_anvil {

// Indices of what is chosen of each row, as the kernels choose.
mx::array compose_choice(const RouterOptions& options, const mx::array& logits, mx::Stream stream);

// The weights of a choice that is made already.
mx::array compose_weights(const RouterOptions& options,
                          const mx::array& logits,
                          const mx::array& indices,
                          mx::Stream stream);

// Of those weights: their tangent for one of the logits, and the gradient in the logits.
mx::array compose_tangent(const RouterOptions& options,
                          const mx::array& logits,
                          const mx::array& indices,
                          const mx::array& tangent,
                          mx::Stream stream);
mx::array compose_gradient(const RouterOptions& options,
                           const mx::array& logits,
                           const mx::array& indices,
                           const mx::array& d_weights,
                           mx::Stream stream);

}  // namespace mlx_anvil

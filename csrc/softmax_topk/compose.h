// softmax_topk in MLX ops: the fallback, and the source of derivatives without a kernel.
#pragma once

#include "common/primitive.h"
#include "softmax_topk/softmax_topk.h"

namespace mlx_anvil {

// Returns the chosen indices of each row, with the kernels' tie rules.
mx::array compose_choice(const RouterOptions& options, const mx::array& logits, mx::Stream stream);

// Returns the weights of a given choice.
mx::array compose_weights(const RouterOptions& options,
                          const mx::array& logits,
                          const mx::array& indices,
                          mx::Stream stream);

// The tangent of those weights for a tangent of the logits, and their gradient in the logits.
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

// softmax_topk in MLX ops: the fallback, and the source of derivatives without a kernel.
#pragma once

#include "common/primitive.h"
#include "softmax_topk/softmax_topk.h"

namespace mlx_anvil {

// What ranks an expert of a group that was not kept, if its score does not become 0: below the key
// of -inf, above the kernels' padding.
inline constexpr int32_t kMaskedKey = INT32_MIN + 2;

// The key of an expert of a group that was not kept. Without a bias no score is below 0.
inline int32_t masked_key(const RouterOptions& options) {
  return options.masks_with_zero && options.has_bias ? 0 : kMaskedKey;
}

// Returns the chosen indices of each row, with the kernels' tie rules. `inputs`: logits[, bias].
mx::array compose_choice(const RouterOptions& options, const Arrays& inputs, mx::Stream stream);

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

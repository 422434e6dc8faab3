// Launches of softmax_topk's Metal kernels, called by the primitives.
#pragma once

#include "common/primitive.h"
#include "softmax_topk/softmax_topk.h"

namespace mlx_anvil {

// The rows of the logits that share one vector of biases.
int64_t rows_per_bias(const mx::array& logits, const mx::array& bias);

// `inputs`: logits[, bias]. `outputs`: weights, indices.
void router_forward_gpu(const RouterOptions& options,
                        const Arrays& inputs,
                        Arrays& outputs,
                        const mx::Stream& stream);

// `inputs`: logits, indices, d_weights.
void router_backward_gpu(const RouterOptions& options,
                         const Arrays& inputs,
                         mx::array& d_logits,
                         const mx::Stream& stream);

}  // namespace mlx_anvil

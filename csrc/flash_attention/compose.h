// Attention as a graph of MLX ops, in float32 for every input dtype. It is the fallback, and the
// definition from which derivatives without a kernel are taken.
#pragma once

#include "common/primitive.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// The arrays of a call, all of rank 4. Each dimension of `mask` is 1 or that of the scores.
struct AttentionInputs {
  mx::array q, k, v;
  std::optional<mx::array> mask;
  std::optional<mx::array> sinks;  // float32 [batch or 1, q_heads]
};

// Returns out, in the dtype of q, and lse.
Arrays compose_attention(const AttentionConfig& config, const AttentionInputs& in, mx::Stream s);

// The requested gradients. Those of k and v always come together.
struct AttentionGradients {
  bool q = false, kv = false, mask = false, sinks = false;
  bool operator==(const AttentionGradients&) const = default;
};

// Returns the wanted ones of d_q; d_k, d_v; d_mask; d_sinks, in this order. d_mask is float32 with
// the shape of the scores, d_sinks float32 [batch, q_heads].
Arrays compose_attention_backward(const AttentionConfig& config,
                                  const AttentionInputs& in,
                                  const mx::array& out,
                                  const mx::array& lse,
                                  const mx::array& d_out,
                                  const std::optional<mx::array>& d_lse,
                                  const AttentionGradients& wanted,
                                  mx::Stream s);

}  // namespace mlx_anvil

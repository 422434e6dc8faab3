// Attention as a graph of MLX ops, in float32 whatever the inputs' dtype: the definition that the
// derivatives without a kernel come from, and what runs where no kernel serves.
#pragma once

#include "common/primitive.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// The arrays of a call. Rank 4; each dimension of `mask` is 1 or that of the scores.
struct AttentionInputs {
  mx::array q, k, v;
  std::optional<mx::array> mask;
  std::optional<mx::array> sinks;  // float32 [batch or 1, q_heads]
};

// out, of the dtype of q, and lse.
Arrays compose_attention(const AttentionConfig& config, const AttentionInputs& in, mx::Stream s);

// Which gradients are asked for. Those of k and v always come together.
struct AttentionGradients {
  bool q = false, kv = false, mask = false, sinks = false;
  bool operator==(const AttentionGradients&) const = default;
};

// d_q; d_k, d_v; d_mask; d_sinks: those that are asked for, in this order. d_mask is float32 and of
// the scores' shape, d_sinks float32 [batch, q_heads].
Arrays compose_attention_backward(const AttentionConfig& config,
                                  const AttentionInputs& in,
                                  const mx::array& out,
                                  const mx::array& lse,
                                  const mx::array& d_out,
                                  const std::optional<mx::array>& d_lse,
                                  const AttentionGradients& wanted,
                                  mx::Stream s);

}  // namespace mlx_anvil

// Attention as a graph of MLX ops, in float32 for every input dtype. It is the fallback, and the
// definition from which derivatives without a kernel are taken.
#pragma once

#include "common/primitive.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// A second part of queries and keys: its products add to those of q and k.
struct SecondPart {
  mx::array q, k;
};

// Returns out, in the dtype of q, and lse.
Arrays compose_attention(const AttentionConfig& config,
                         const AttentionInputs& in,
                         mx::Stream s,
                         const std::optional<SecondPart>& part = std::nullopt);

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

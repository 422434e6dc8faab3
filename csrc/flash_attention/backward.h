// The gradients of flash_attention, computed from what the forward saved. Called by the forward's
// vjp.
#pragma once

#include "common/primitive.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// `inputs`: the forward's operands, out, lse (dense), d_out and optionally d_lse. Returns those of
// these that are wanted: d_q; d_k and d_v; d_mask (float32, shape of the scores); d_sinks (float32
// [batch, q_heads]).
Arrays apply_attention_backward(const AttentionConfig& config,
                                const AttentionGradients& wanted,
                                const Arrays& inputs,
                                bool has_d_lse,
                                mx::Stream stream);

}  // namespace mlx_anvil

// The gradients of flash_attention, from what the forward saved.
#pragma once

#include "flash_attention/compose.h"

namespace mlx_anvil {

// `inputs`: the operands of the forward, out, lse (dense), d_out and perhaps d_lse. Gives d_q; d_k,
// d_v; d_mask (float32, of the scores' shape); d_sinks (float32 [batch, q_heads]): those wanted.
Arrays apply_attention_backward(const AttentionConfig& config,
                                const AttentionGradients& wanted,
                                const Arrays& inputs,
                                bool has_d_lse,
                                mx::Stream stream);

}  // namespace mlx_anvil

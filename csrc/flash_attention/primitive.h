// The primitives of flash_attention: forward, and the gradients from what the forward saved.
#pragma once

#include "common/primitive.h"
#include "flash_attention/compose.h"

namespace mlx_anvil {

// out, and lse when `with_lse`. The route to a kernel has been decided (flash_attention.cpp).
Arrays apply_attention(const AttentionConfig& config,
                       const AttentionInputs& in,
                       bool with_lse,
                       mx::Stream stream);

// Why no kernel serves heads of this size, or null. `fused_gradient`: whether the backward kernels
// are needed too.
const char* why_not_fused(int head_dim, int v_head_dim, int q_len, bool fused_gradient);

}  // namespace mlx_anvil

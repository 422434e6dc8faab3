// The forward of flash_attention, for shapes that have a kernel.
#pragma once

#include "flash_attention/compose.h"

namespace mlx_anvil {

// out, and lse when `with_lse`.
Arrays apply_attention(const AttentionConfig& config,
                       AttentionInputs in,
                       bool with_lse,
                       mx::Stream stream);

// Why no kernel serves heads of this size, or null; with `gradient`, those of the backward.
const char* why_not_fused(int head_dim, int v_head_dim, int q_len, bool gradient);

}  // namespace mlx_anvil

// The forward of flash_attention as a graph node, for shapes with a kernel.
#pragma once

#include "common/primitive.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// Returns out, and lse if `with_lse`.
Arrays apply_attention(const AttentionConfig& config,
                       AttentionInputs in,
                       bool with_lse,
                       mx::Stream stream);

// Returns the reason why no kernel supports these sizes, or null. `gradient` asks about the
// backward.
const char* why_not_fused(int head_dim, int v_head_dim, bool gradient, bool on_gpu);

}  // namespace mlx_anvil

// mla_decode as a graph node, for sizes with a kernel.
#pragma once

#include "common/primitive.h"
#include "mla_decode/mla_decode.h"
#include "mla_decode/problem.h"

namespace mlx_anvil {

// head_dim and v_head_dim are the rank.
AttentionSizes sizes_of(const MlaInputs& in);

// Returns out, and lse if `with_lse`.
Arrays apply_mla(const AttentionConfig& config, MlaInputs in, bool with_lse, mx::Stream stream);

}  // namespace mlx_anvil

// mla_decode as a graph of MLX ops, in float32 for every input dtype. It is the fallback, and the
// definition from which derivatives are taken.
#pragma once

#include "common/primitive.h"
#include "flash_attention/problem.h"
#include "mla_decode/mla_decode.h"

namespace mlx_anvil {

// Returns out, in the dtype of q_nope, and lse.
Arrays compose_mla(const AttentionConfig& config, const MlaInputs& in, mx::Stream s);

}  // namespace mlx_anvil

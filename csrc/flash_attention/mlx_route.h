// Plain attention by MLX's own kernel, on GPUs where that is faster.
#pragma once

#include <optional>

#include "common/evaluate.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// Returns MLX's kernel if it takes the call and is faster than ours. No lse is wanted.
std::optional<MlxKernel> faster_mlx_attention(const AttentionConfig& config,
                                              const AttentionInputs& in,
                                              mx::Stream stream);

// The forward as a graph around MLX's kernel, for calls that it takes.
mx::array mlx_attention(const AttentionConfig& config, const AttentionInputs& in, mx::Stream s);

}  // namespace mlx_anvil

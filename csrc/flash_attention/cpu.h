// Attention on the CPU, called from the primitives' stream tasks. Both functions return when the
// work is done; they use the calling thread and those of parallel_for().
#pragma once

#include "flash_attention/problem.h"

namespace mlx_anvil {

void attention_forward_cpu(const AttentionForwardArgs& args);
void attention_backward_cpu(const AttentionBackwardArgs& args);

}  // namespace mlx_anvil

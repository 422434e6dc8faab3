// Attention on the CPU. Both run on the calling thread and those of `parallel_for`, until done.
#pragma once

#include "flash_attention/problem.h"

namespace mlx_anvil {

void attention_forward_cpu(const AttentionForwardArgs& args);
void attention_backward_cpu(const AttentionBackwardArgs& args);

}  // namespace mlx_anvil

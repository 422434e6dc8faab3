// Attention on the CPU, called from the primitives' stream tasks. The functions return when the
// work is done; they use the calling thread and those of parallel_for().
#pragma once

#include "flash_attention/quantized_problem.h"

namespace mlx_anvil {

void attention_forward_cpu(const AttentionForwardArgs& args);
void quantized_attention_forward_cpu(const QuantizedAttentionArgs& args);
void attention_backward_cpu(const AttentionBackwardArgs& args);

}  // namespace mlx_anvil

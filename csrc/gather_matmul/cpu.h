// Gathered products on the CPU. They use the calling thread and those of `parallel_for`, and return
// when the result is complete.
#pragma once

#include "gather_matmul/problem.h"

namespace mlx_anvil {

void gather_quantized_matmul_cpu(const GatherQuantizedArgs& args);
void gather_quantized_swiglu_cpu(const GatherSwigluArgs& args);
void gather_matmul_cpu(const GatherDenseArgs& args);
void gather_scale_gradient_cpu(const GatherScaleGradientArgs& args);
void gather_outer_cpu(const GatherOuterArgs& args);
void sum_pairs_cpu(const SumPairsArgs& args);

}  // namespace mlx_anvil

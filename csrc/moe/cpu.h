// moe_permute and moe_combine on the CPU, called from the primitives' stream tasks. The functions
// return when the work is done; they use the calling thread and those of parallel_for().
#pragma once

#include "moe/problem.h"

namespace mlx_anvil {

void moe_sort_cpu(const MoeSortArgs& args);
void moe_spread_cpu(const MoeSpreadArgs& args);
void moe_combine_cpu(KernelDtype dtype, const MoeCombineArgs& args);
void moe_backward_cpu(KernelDtype dtype, const MoeBackwardArgs& args);

}  // namespace mlx_anvil

// softmax_topk on the CPU, called from the primitives' stream tasks. Both functions return when the
// work is done; they use the calling thread and those of parallel_for().
#pragma once

#include "softmax_topk/simd/kernels.h"

namespace mlx_anvil {

struct RouterProblem {
  KernelDtype dtype = KernelDtype::kFloat32;
  int64_t rows = 0;
};

void router_forward_cpu(const RouterProblem& problem, const RouterForwardArgs& args);
void router_backward_cpu(const RouterProblem& problem, const RouterBackwardArgs& args);

}  // namespace mlx_anvil

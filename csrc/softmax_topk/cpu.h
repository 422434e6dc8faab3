// softmax_topk on the CPU. Both run on the calling thread and those of `parallel_for`, until done.
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

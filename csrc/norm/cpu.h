// The norms on the CPU. Both run on the calling thread and those of `parallel_for`, until done.
#pragma once

#include "norm/simd/kernels.h"

namespace mlx_anvil {

// The weight and the bias as the call has them, a row for each group of rows.
struct NormVectors {
  NormOperand weight, bias;
  bool are_float32 = false;  // otherwise of the dtype of the rows
  float weight_offset = 0;
};

struct NormProblem {
  KernelDtype dtype = KernelDtype::kFloat32;  // of the rows
  bool centred = false;
  int64_t rows = 0;
  int64_t groups = 1;  // equal ones of neighbouring rows, each with a weight and a bias of its own
  NormVectors vectors;
};

// `args` without the weight and the bias, which are filled in from the problem.
void norm_forward_cpu(const NormProblem& problem, NormForwardArgs args);

// Gradients of the weight and of the bias that are not wanted are null.
void norm_backward_cpu(const NormProblem& problem,
                       NormBackwardArgs args,
                       void* d_weight,
                       void* d_bias);

}  // namespace mlx_anvil

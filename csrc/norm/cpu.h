// The norms on the CPU, called from the primitives' stream tasks. Both functions return when the
// work is done; they use the calling thread and those of parallel_for().
#pragma once

#include "norm/simd/kernels.h"

namespace mlx_anvil {

// Weight and bias as the call passes them, one row per group.
struct NormVectors {
  NormOperand weight, bias;
  bool are_float32 = false;  // otherwise they have the rows' dtype
  float weight_offset = 0;
};

struct NormProblem {
  KernelDtype dtype = KernelDtype::kFloat32;  // of the rows
  bool centred = false;
  int64_t rows = 0;
  int64_t groups = 1;  // equal runs of adjacent rows, each with its own weight and bias
  NormVectors vectors;
};

// Weight and bias in `args` are filled in from the problem.
void norm_forward_cpu(const NormProblem& problem, NormForwardArgs args);

// Null `d_weight` or `d_bias`: not wanted.
void norm_backward_cpu(const NormProblem& problem,
                       NormBackwardArgs args,
                       void* d_weight,
                       void* d_bias);

}  // namespace mlx_anvil

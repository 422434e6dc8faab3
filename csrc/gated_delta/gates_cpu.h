// gated_delta_gates on the CPU, called from the primitives' stream tasks.
#pragma once

#include "gated_delta/simd/gates_kernels.h"

namespace mlx_anvil {

void gated_delta_gates_cpu(const DeltaGatesForwardArgs& args);

// Null `d_a_log` and `d_dt_bias`: not wanted. They have the dtypes of the weights.
void gated_delta_gates_backward_cpu(const DeltaGatesBackwardArgs& args,
                                    void* d_a_log,
                                    void* d_dt_bias);

}  // namespace mlx_anvil

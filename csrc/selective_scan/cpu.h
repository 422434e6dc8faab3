// The CPU driver of selective_scan.
#pragma once

#include "selective_scan/simd/kernels.h"

namespace mlx_anvil {

void scan_forward_cpu(const ScanForwardArgs& args);

// Gradients of B and C go to d_b and d_c, [batch, steps, states] of the dtype.
void scan_backward_cpu(const ScanBackwardArgs& args, void* d_b, void* d_c);

}  // namespace mlx_anvil

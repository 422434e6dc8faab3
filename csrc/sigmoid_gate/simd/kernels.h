// Declarations of sigmoid_gate's CPU kernels.
#pragma once

#include "common/elementwise_args.h"
#include "common/isa.h"

namespace mlx_anvil {

MLX_ANVIL_DECLARE_KERNELS(ElementwiseKernels, sigmoid_gate_forward_kernels)
MLX_ANVIL_DECLARE_KERNELS(ElementwiseKernels, sigmoid_gate_backward_kernels)
MLX_ANVIL_DECLARE_KERNELS(ElementwiseKernels, sigmoid_gate_jvp_kernels)

}  // namespace mlx_anvil

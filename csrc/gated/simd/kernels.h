// Declarations of gated's CPU kernels.
#pragma once

#include "common/elementwise_args.h"
#include "common/isa.h"

namespace mlx_anvil {

#define MLX_ANVIL_DECLARE_GATE(activation)                                             \
  MLX_ANVIL_DECLARE_KERNELS(ElementwiseKernels, gated_##activation##_forward_kernels)  \
  MLX_ANVIL_DECLARE_KERNELS(ElementwiseKernels, gated_##activation##_backward_kernels) \
  MLX_ANVIL_DECLARE_KERNELS(ElementwiseKernels, gated_##activation##_jvp_kernels)

MLX_ANVIL_DECLARE_GATE(silu)
MLX_ANVIL_DECLARE_GATE(gelu)
MLX_ANVIL_DECLARE_GATE(gelu_tanh)
MLX_ANVIL_DECLARE_GATE(relu2)
MLX_ANVIL_DECLARE_GATE(swiglu_oai)

#undef MLX_ANVIL_DECLARE_GATE

}  // namespace mlx_anvil

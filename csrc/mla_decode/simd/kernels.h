// Interface of the CPU kernels (common/isa.h). Their tables are those of an attention forward.
#pragma once

#include "flash_attention/simd/kernels.h"
#include "mla_decode/problem.h"

namespace mlx_anvil {

using MlaKernels = ForwardKernels<MlaArgs>;

MLX_ANVIL_DECLARE_KERNELS(PerDtype<MlaKernels>, mla_kernels)

}  // namespace mlx_anvil

// Declarations of rope's CPU kernels.
#pragma once

#include "common/isa.h"
#include "rope/problem.h"

namespace mlx_anvil {

MLX_ANVIL_DECLARE_KERNELS(RopeKernels, rope_kernels)

}  // namespace mlx_anvil

// Declarations of kv_append's CPU kernels.
#pragma once

#include "common/isa.h"
#include "kv_append/problem.h"

namespace mlx_anvil {

MLX_ANVIL_DECLARE_KERNELS(KvAppendKernels, kv_append_kernels)

}  // namespace mlx_anvil

// Declarations of the CPU kernels of moe_permute and moe_combine.
#pragma once

#include "common/isa.h"
#include "moe/problem.h"

namespace mlx_anvil {

// Columns of a token that are one piece of work for moe_combine.
inline constexpr int64_t kMoePieceColumns = 1024;

// Copies the rows of pairs [begin, end).
struct MoeSpreadKernels {
  void (*of)(const MoeSpreadArgs& args, int64_t begin, int64_t end);
};

// Computes pieces [begin, end), numbered row by row. `scratch` must hold scratch_bytes().
struct MoeCombineKernels {
  PerDtype<void (*)(const MoeCombineArgs& args, int64_t begin, int64_t end, void* scratch)> of;
  int64_t (*scratch_bytes)(int64_t chosen);
};

// Computes tokens [begin, end).
struct MoeBackwardKernels {
  PerDtype<void (*)(const MoeBackwardArgs& args, int64_t begin, int64_t end)> of;
};

MLX_ANVIL_DECLARE_KERNELS(MoeSpreadKernels, moe_spread_kernels)
MLX_ANVIL_DECLARE_KERNELS(MoeCombineKernels, moe_combine_kernels)
MLX_ANVIL_DECLARE_KERNELS(MoeBackwardKernels, moe_backward_kernels)

}  // namespace mlx_anvil

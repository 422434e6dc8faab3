// Declarations of causal_conv1d's CPU kernels.
#pragma once

#include "causal_conv1d/problem.h"
#include "common/isa.h"

namespace mlx_anvil {

// What one call of a kernel computes: some channels of some tiles, all of one group. A tile is a
// run of `tile_rows` rows of a batch: of y for the forward pass, of x with the state in front for
// the backward pass.
struct ConvPiece {
  int64_t first_tile, last_tile, tiles_per_batch, tile_rows;
  int64_t first_channel, last_channel;
  bool continues;  // the call before was of the same channels, up to the first tile
};

// Weights in the order of the kernels, in float32: for each block of channels, a block per tap and
// one of the bias. Sums of their gradients are in the same order.
struct ConvVectorKernels {
  void (*widen)(
      const ConvProblem& problem, int64_t group, int64_t first, int64_t last, float* weights);
  void (*narrow)(const ConvBackwardArgs& args, int64_t group, const float* sums);
};

using ConvForwardKernel = void (*)(const ConvForwardArgs& args,
                                   const ConvPiece& piece,
                                   const float* weights);

// Adds to `sums`, which is null if no sums are wanted. `carry` has width - 1 numbers per channel,
// which a call leaves for the one that continues it.
using ConvBackwardKernel = void (*)(const ConvBackwardArgs& args,
                                    const ConvPiece& piece,
                                    const float* weights,
                                    float* sums,
                                    float* carry);

template <class Kernel>
struct ConvTable {
  PerDtype<Kernel> of[kConvWidths];
  int64_t block;  // of channels

  [[gnu::always_inline]] const Kernel& operator[](const ConvProblem& problem) const {
    return of[problem.width - kConvLeastWidth][problem.dtype];
  }
};

MLX_ANVIL_DECLARE_KERNELS(ConvTable<ConvVectorKernels>, conv_vector_kernels)
MLX_ANVIL_DECLARE_KERNELS(ConvTable<ConvForwardKernel>, conv_forward_kernels)
MLX_ANVIL_DECLARE_KERNELS(ConvTable<ConvBackwardKernel>, conv_backward_kernels)

}  // namespace mlx_anvil

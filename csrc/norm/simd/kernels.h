// What the host hands to the CPU kernels of the norms. Plain data (see isa.h).
#pragma once

#include "common/dtype.h"
#include "common/isa.h"
#include "metal/norm/params.h"

namespace mlx_anvil {

// An input of rows; no data where the call has none.
struct NormOperand {
  const void* data = nullptr;
  NormRowParams rows = {};
};

inline constexpr int kNormScratchRows = 4;  // rows that a kernel may need memory for

// Of all rows; every output is dense. The weight and the bias are widened, in the kernels' order of
// elements (NormVectorKernels), `padded_columns` to a group of rows.
struct NormForwardArgs {
  NormOperand x, residual, gate;
  const float* weight;
  const float* bias;  // of layer_norm
  void* y;
  void* h;  // x + residual
  int64_t rows_per_group;
  int64_t columns, padded_columns;
  float eps;
  bool stream_outputs;  // write past the cache; every row then starts at a cache line
};

struct NormBackwardArgs {
  NormOperand h, gate, d_y, d_h;
  const float* weight;
  void* d_x;
  void* d_gate;
  int64_t rows_per_group;
  int64_t columns, padded_columns;
  float eps;
  bool stream_outputs;
};

// Where a backward adds up its rows' shares of these gradients: padded, in the kernels' order.
struct NormSums {
  float* weight;  // null: not wanted
  float* bias;
};

// `scratch`: kNormScratchRows rows of the dtype, where a column stride is not 1 or outputs are
// streamed.
using NormForwardKernel = void (*)(const NormForwardArgs& args,
                                   int64_t begin,
                                   int64_t end,
                                   void* scratch);
using NormBackwardKernel = void (*)(
    const NormBackwardArgs& args, int64_t begin, int64_t end, const NormSums& sums, void* scratch);

// Weights, biases and their gradients between memory and the kernels' order of elements.
struct NormVectorKernels {
  // to = offset + from, padded to a multiple of the block; `from` has the kernels' dtype, or
  // float32.
  void (*widen)(const void* from, bool is_float32, float offset, int64_t columns, float* to);

  // to[begin, end) = the sum of `parts`, `stride` floats apart; `begin` is a multiple of the block.
  void (*sum_parts)(const float* parts,
                    int64_t count,
                    int64_t stride,
                    int64_t begin,
                    int64_t end,
                    bool is_float32,
                    void* to);
};

template <class Kernel>
struct NormKernels {
  Kernel rms, layer;
};
struct NormVectorTable {
  PerDtype<NormVectorKernels> of;
  int64_t block;  // columns are padded to a multiple of it
};

MLX_ANVIL_DECLARE_KERNELS(PerDtype<NormKernels<NormForwardKernel>>, norm_forward_kernels)
MLX_ANVIL_DECLARE_KERNELS(PerDtype<NormKernels<NormBackwardKernel>>, norm_backward_kernels)
MLX_ANVIL_DECLARE_KERNELS(NormVectorTable, norm_vector_kernels)

}  // namespace mlx_anvil

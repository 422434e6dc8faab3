// Arguments of the norms' CPU kernels, filled by cpu.cpp. Plain data (see isa.h).
#pragma once

#include "common/dtype.h"
#include "common/isa.h"
#include "metal/norm/params.h"

namespace mlx_anvil {

// An input with rows. `data` is null if the call lacks it.
struct NormOperand {
  const void* data = nullptr;
  NormRowParams rows = {};
};

inline constexpr int kNormScratchRows = 4;  // most rows of scratch memory that a kernel needs

// The arguments cover all rows, and every output is dense. Weight and bias are float32, in the
// kernels' element order (NormVectorKernels), with `padded_columns` per group.
struct NormForwardArgs {
  NormOperand x, residual, gate;
  const float* weight;
  const float* bias;  // layer_norm only
  void* y;
  void* h;  // x + residual
  int64_t rows_per_group;
  int64_t columns, padded_columns;
  float eps;
  bool gate_is_sigmoid;  // else silu
  bool stream_outputs;   // use streaming stores; every row then starts at a cache line
};

struct NormBackwardArgs {
  NormOperand h, gate, d_y, d_h;
  const float* weight;
  void* d_x;
  void* d_gate;
  int64_t rows_per_group;
  int64_t columns, padded_columns;
  float eps;
  bool gate_is_sigmoid;
  bool stream_outputs;
};

// Accumulators for weight and bias gradients over the rows: padded, in the kernels' element order.
struct NormSums {
  float* weight;  // null: not wanted
  float* bias;
};

// `scratch` holds kNormScratchRows rows of the dtype. It is needed if a column stride is not 1 or
// if outputs use streaming stores.
using NormForwardKernel = void (*)(const NormForwardArgs& args,
                                   int64_t begin,
                                   int64_t end,
                                   void* scratch);
using NormBackwardKernel = void (*)(
    const NormBackwardArgs& args, int64_t begin, int64_t end, const NormSums& sums, void* scratch);

// Convert weights, biases and their gradients between memory order and the kernels' element order.
struct NormVectorKernels {
  // to = offset + from, padded to a multiple of the block. `from` has the kernels' dtype, or
  // float32.
  void (*widen)(const void* from, bool is_float32, float offset, int64_t columns, float* to);

  // to[begin, end) = the sum of `count` parts, `stride` floats apart. `begin` is a multiple of the
  // block.
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
  int64_t block;  // columns are padded to a multiple of this
};

MLX_ANVIL_DECLARE_KERNELS(PerDtype<NormKernels<NormForwardKernel>>, norm_forward_kernels)
MLX_ANVIL_DECLARE_KERNELS(PerDtype<NormKernels<NormBackwardKernel>>, norm_backward_kernels)
MLX_ANVIL_DECLARE_KERNELS(NormVectorTable, norm_vector_kernels)

}  // namespace mlx_anvil

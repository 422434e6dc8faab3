// One gathered product on a GPU, and which kernel takes it.
#pragma once

#include "gather_matmul/gpu.h"
#include "metal/gather_matmul/params.h"
#include "quantized_matmul/gpu_request.h"

namespace mlx_anvil {

struct GatherRequest {
  const GatherSizes& sizes;
  QuantizedProduct product;
  const QuantizedFormat* format;  // null: w is dense
  const mx::array& x;
  InlineVector<QuantizedWeightArrays, 2> matrices;
  InlineVector<const mx::array*, 2> vectors;  // those of gate and up; null where there are none
  GateOptions activation;
  const PairIds& ids;
  mx::array& out;
  const mx::Stream& stream;

  bool is_gated() const { return matrices.size() == 2; }
  bool is_transposed() const { return product == QuantizedProduct::kTransposed; }
  int64_t results() const { return is_transposed() ? sizes.outputs : sizes.columns; }
  int64_t terms() const { return is_transposed() ? sizes.columns : sizes.outputs; }

  // What the kernels of quantized_matmul ask about.
  QuantizedRequest of_matrices() const { return {x, matrices, out, stream, activation}; }
};

// The kernels of metal/gather_matmul: few.metal, tiles.metal, those of matrix.metal, group.metal.
enum class GatherKernel { kFew, kTiles, kFewMatrix, kGemm, kGemmGroup };

struct GatherChoice {
  GatherKernel kernel = GatherKernel::kFew;
  bool in_table = false;     // tiles are runs of pairs
  int64_t rows = 0;          // of x per tile, at most
  int64_t columns = 0;       // of out per threadgroup
  int64_t threads = 0;       // per threadgroup
  int64_t memory = 0;        // of a threadgroup, in bytes
  int64_t simdgroups = 0;    // kFewMatrix: per threadgroup
  bool stages_x = false;     // kFewMatrix
  int64_t step = 64;         // along the summed dimension
  int64_t factor_bytes = 0;  // kGemm, kGemmGroup: as in GatherGemmParams

  bool is_gemm() const {
    return kernel == GatherKernel::kGemm || kernel == GatherKernel::kGemmGroup;
  }
};

GatherChoice choose_gather(const GatherRequest& request);

}  // namespace mlx_anvil

// Quantized products of many rows as dense products: blocks of w are dequantised to 16 bits, and
// MLX's dense product multiplies them. On GPUs with matrix units that is faster than any kernel
// that unpacks w itself.
#pragma once

#include "common/launch.h"
#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// One block of a product: some of its matrices, and some rows of w (x W^T) or columns (x W).
struct DenseBlocks {
  int64_t matrices;  // of the batch; more than one only if all of w's rows or columns are taken
  int64_t split;     // rows or columns
};

// Returns the largest blocks whose weights fit the scratch memory.
DenseBlocks dense_blocks(const QuantizedSizes& sizes, QuantizedProduct product);

// Sets how much scratch memory a call may take, and returns the limit before. For tests.
int64_t set_dense_scratch_bytes(int64_t bytes);

// `out` gets its memory here. No dimension may be empty, and x has 16 bits.
void quantized_dense_gpu(const QuantizedFormat& format,
                         const QuantizedSizes& sizes,
                         QuantizedProduct product,
                         const mx::array& x,
                         const QuantizedWeightArrays& weights,
                         mx::array& out,
                         const mx::Stream& stream);

// A kernel that dequantises a block of w to the dtype of x. Bindings: `inputs`, the block,
// QuantizedBlockParams. A thread has eight columns.
struct DequantizeKernel {
  const Kernel& kernel;
  KernelInputs inputs;
  int32_t group_shift;
};

// The same with any such kernel. `op` is the name that trace() shows.
void dense_product_gpu(const char* op,
                       const DequantizeKernel& dequantizer,
                       const QuantizedSizes& sizes,
                       QuantizedProduct product,
                       const mx::array& x,
                       mx::array& out,
                       const mx::Stream& stream);

}  // namespace mlx_anvil

// Quantized products and their gradients on the CPU. All use the calling thread and those of
// `parallel_for`, and return when the result is complete.
#pragma once

#include <vector>

#include "quantized_matmul/problem.h"

namespace mlx_anvil {

// A matrix [outputs, columns] and its product, [rows, outputs].
struct QuantizedProductArgs {
  QuantizedWeights weights;
  int64_t outputs;
  void* out;
};

// Products kTransposed of one x with several matrices, each of rank 2.
struct QuantizedProductsArgs {
  KernelDtype dtype;
  QuantizedFormat format;
  int64_t rows;
  int64_t columns;
  const void* x;
  std::vector<QuantizedProductArgs> products;
};

void quantized_products_cpu(const QuantizedProductsArgs& args);
void quantized_matmul_cpu(const QuantizedMatmulArgs& args);
void quantized_swiglu_cpu(const QuantizedSwigluArgs& args);
void quantized_scale_gradient_cpu(const QuantizedScaleGradientArgs& args);

}  // namespace mlx_anvil

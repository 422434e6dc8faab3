// Quantized products and their gradients on the CPU. All use the calling thread and those of
// `parallel_for`, and return when the result is complete.
#pragma once

#include "quantized_matmul/problem.h"

namespace mlx_anvil {

void quantized_matmul_cpu(const QuantizedMatmulArgs& args);
void quantized_swiglu_cpu(const QuantizedSwigluArgs& args);
void quantized_scale_gradient_cpu(const QuantizedScaleGradientArgs& args);

}  // namespace mlx_anvil

// Quantized products on a GPU, and in the simulator: the choice of kernels and their launches.
#pragma once

#include <string>

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// Whether kernels serve such a call on `stream`, and if not, why: then MLX's own op takes it.
bool can_launch_quantized(const QuantizedSizes& sizes,
                          const mx::Stream& stream,
                          std::string* why_not);

// `out` is allocated, not empty, and so is the sum.
void quantized_matmul_gpu(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          const mx::array& x,
                          const QuantizedWeightArrays& weights,
                          mx::array& out,
                          const mx::Stream& stream);

void quantized_swiglu_gpu(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          const mx::array& x,
                          const QuantizedWeightArrays& gate,
                          const QuantizedWeightArrays& up,
                          mx::array& out,
                          const mx::Stream& stream);

}  // namespace mlx_anvil

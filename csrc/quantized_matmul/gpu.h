// Quantized products on a GPU, and in the simulator: kernel selection and launches.
#pragma once

#include <string>

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// Returns true if the kernels support such a call on `stream`. Otherwise sets *why_not, and MLX's
// own op takes the call.
bool can_launch_quantized(const QuantizedSizes& sizes,
                          const mx::Stream& stream,
                          std::string* why_not,
                          bool stores_results = true);

// `out` must be allocated and not empty, and the summed dimension must not be empty.
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
                          const GateOptions& activation,
                          mx::array& out,
                          const mx::Stream& stream);

}  // namespace mlx_anvil

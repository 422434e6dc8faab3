#pragma once

#include "quantized_matmul/gpu.h"

namespace mlx_anvil {

// `indices` and `values` are [..., kept], not empty, and allocated.
void quantized_head_gpu(const QuantizedFormat& format,
                        const QuantizedSizes& sizes,
                        const mx::array& x,
                        const QuantizedWeightArrays& weights,
                        mx::array& indices,
                        mx::array& values,
                        const mx::Stream& stream);

}  // namespace mlx_anvil

// The gradients of quantized_embedding in scales and biases as a primitive of CPU streams.
#pragma once

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// Returns the gradients in scales and biases, [rows of w, groups]: for each row, the sums of dy
// [..., K] over the places of its id, by groups, times codes for scales. ids [...] have 32 or 64
// bits.
Arrays apply_embedding_scale_gradient(
    const QuantizedFormat& format, mx::array dy, mx::array ids, mx::array w, mx::Stream s);

}  // namespace mlx_anvil

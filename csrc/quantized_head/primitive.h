#pragma once

#include "quantized_head/quantized_head.h"

namespace mlx_anvil {

// Returns the `kept` best logits of each row of x [..., K]. Uses our kernels, or MLX's ops if no
// kernel supports the call (`trace()` then shows them under `op`). x, scales and biases share one
// dtype, as in apply_quantized_matmul(); w has rank 2.
BestLogits apply_quantized_head(const char* op,
                                const QuantizedFormat& format,
                                mx::array x,
                                QuantizedMatrix matrix,
                                int kept,
                                mx::Stream s);

}  // namespace mlx_anvil

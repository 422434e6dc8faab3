#pragma once

#include "quantized_head/quantized_head.h"

namespace mlx_anvil {

// The `kept` best logits of each row of x [..., K], by our kernels, or by MLX's ops where there are
// none (which `trace()` shows under `op`). x, scales and biases have one dtype (but for scales of
// uint8); w has rank 2.
BestLogits apply_quantized_head(const char* op,
                                const QuantizedFormat& format,
                                mx::array x,
                                QuantizedMatrix matrix,
                                int kept,
                                mx::Stream s);

}  // namespace mlx_anvil

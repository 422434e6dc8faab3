// The primitives of quantized products. Both take x of any rank with w of rank 2, or x and w with
// the same leading dimensions; scales and biases have the leading dimensions of w.
#pragma once

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// The product by our kernels, or by MLX's op where there is none (which `trace()` shows under
// `op`). x, scales and biases have one dtype (but for scales of uint8).
mx::array apply_quantized_matmul(const char* op,
                                 const QuantizedFormat& format,
                                 QuantizedProduct product,
                                 mx::array x,
                                 QuantizedMatrix matrix,
                                 mx::Stream s);

mx::array apply_quantized_swiglu(const QuantizedFormat& format,
                                 mx::array x,
                                 QuantizedMatrix gate,
                                 QuantizedMatrix up,
                                 mx::Stream s);

// Sizes of a call; the rows of a shared w count all rows of x.
QuantizedSizes quantized_sizes(const QuantizedFormat& format,
                               const mx::array& x,
                               const mx::array& w);

}  // namespace mlx_anvil

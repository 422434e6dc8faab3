#pragma once

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// ids of 32 or 64 bits; `dtype` is that of scales and biases where there are any.
mx::array apply_quantized_embedding(const QuantizedFormat& format,
                                    mx::array ids,
                                    QuantizedMatrix matrix,
                                    mx::Dtype dtype,
                                    mx::Stream s);

}  // namespace mlx_anvil

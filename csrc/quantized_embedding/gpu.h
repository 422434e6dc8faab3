#pragma once

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// `out` must be allocated.
void quantized_embedding_gpu(const QuantizedFormat& format,
                             const mx::array& ids,
                             const QuantizedWeightArrays& weights,
                             mx::array& out,
                             const mx::Stream& stream);

}  // namespace mlx_anvil

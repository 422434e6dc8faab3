#pragma once

#include "quantized_embedding/cpu.h"
#include "quantized_matmul/compose.h"

namespace mlx_anvil {

RowIds row_ids(const mx::array& ids);

// ids have 32 or 64 bits. `dtype` equals that of scales and biases for affine formats.
mx::array apply_quantized_embedding(const QuantizedFormat& format,
                                    mx::array ids,
                                    QuantizedMatrix matrix,
                                    mx::Dtype dtype,
                                    mx::Stream s);

}  // namespace mlx_anvil

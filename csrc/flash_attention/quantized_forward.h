// The forward of flash_attention over quantized keys and values as a graph node.
#pragma once

#include "common/primitive.h"
#include "flash_attention/quantized.h"

namespace mlx_anvil {

// Returns out, and lse if `with_lse`.
Arrays apply_quantized_attention(const AttentionConfig& config,
                                 const QuantizedKvFormats& formats,
                                 QuantizedAttentionInputs in,
                                 bool with_lse,
                                 mx::Stream stream);

// The same call on arrays, with keys and values dequantized to the dtype of q.
AttentionInputs dequantized_inputs(const QuantizedKvFormats& formats,
                                   const QuantizedAttentionInputs& in,
                                   mx::Stream stream);

}  // namespace mlx_anvil

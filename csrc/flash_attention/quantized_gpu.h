// Attention over quantized keys and values on GPUs and in the simulator.
#pragma once

#include "flash_attention/quantized.h"

namespace mlx_anvil {

// The arrays of a call, with mask and sinks broadcast and outputs allocated. Absent ones are null.
struct QuantizedForwardArrays {
  const QuantizedAttentionInputs& in;
  mx::array* out;
  mx::array* lse = nullptr;
};

// Codes, scales and biases may have any strides but that of their last axis, which is 1.
void quantized_attention_forward_gpu(const AttentionConfig& config,
                                     const QuantizedKvFormats& formats,
                                     const AttentionSizes& sizes,
                                     const QuantizedForwardArrays& arrays,
                                     const mx::Stream& stream);

}  // namespace mlx_anvil

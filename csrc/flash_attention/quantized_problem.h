// Attention over quantized keys and values as plain data: problem.h with codes in place of k and v.
// A row of codes is packed as a row of a quantized matrix (quantized_matmul/problem.h), so its head
// dim is a multiple of the group size.
#pragma once

#include "flash_attention/problem.h"
#include "quantized_matmul/problem.h"

namespace mlx_anvil {

// Keys or values. Strides in elements: batch, head, row. The last stride of each array is 1.
struct QuantizedView {
  QuantizedFormat format;
  QuantizedWeights data;
  int64_t w_strides[3] = {};
  int64_t scales_strides[3] = {};
  int64_t biases_strides[3] = {};
};

// k and v of the base are unset. Affine scales and biases have the operands' dtype.
struct QuantizedAttentionArgs : AttentionForwardArgs {
  QuantizedView keys, values;
};

}  // namespace mlx_anvil

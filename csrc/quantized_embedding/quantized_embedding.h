#pragma once

#include "quantized_matmul/checks.h"

namespace mlx_anvil {

inline constexpr const char* kQuantizedEmbedding = "quantized_embedding";

// Dequantises the rows `ids` of the matrix to [*ids.shape, K]. `dtype` defaults to the promoted
// dtype of scales and biases for affine formats, and to bfloat16 otherwise.
mx::array quantized_embedding(const mx::array& ids,
                              QuantizedMatrix matrix,
                              const QuantizedOptions& options,
                              const std::optional<mx::Dtype>& dtype,
                              mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

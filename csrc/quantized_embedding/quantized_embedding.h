#pragma once

#include "quantized_matmul/checks.h"

namespace mlx_anvil {

inline constexpr const char* kQuantizedEmbedding = "quantized_embedding";  // in messages

// Rows ids of the matrix in full, [*ids.shape, K]. Affine: in `dtype`, else in the promoted dtype
// of scales and biases; other modes: in `dtype`, else in bfloat16.
mx::array quantized_embedding(const mx::array& ids,
                              QuantizedMatrix matrix,
                              const QuantizedOptions& options,
                              const std::optional<mx::Dtype>& dtype,
                              mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

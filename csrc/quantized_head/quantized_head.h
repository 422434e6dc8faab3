// The ops that end a language model: the best logits of x W^T, without an array of all of them.
#pragma once

#include "quantized_matmul/checks.h"

namespace mlx_anvil {

// The most that quantized_topk gives.
inline constexpr int kMostKept = 256;

struct BestLogits {
  mx::array indices;  // uint32
  mx::array values;   // of x's dtype
};

// Of each row of x [..., K]: [...].
BestLogits quantized_argmax(const mx::array& x,
                            QuantizedMatrix matrix,
                            const QuantizedOptions& options,
                            mx::StreamOrDevice stream);

// [..., k], best first.
BestLogits quantized_topk(const mx::array& x,
                          QuantizedMatrix matrix,
                          int64_t k,
                          const QuantizedOptions& options,
                          mx::StreamOrDevice stream);

}  // namespace mlx_anvil

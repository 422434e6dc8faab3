// Ops at the end of a language model: the best logits of x W^T, without materialising all of them.
#pragma once

#include "quantized_matmul/checks.h"

namespace mlx_anvil {

// Upper limit of k in quantized_topk.
inline constexpr int kMostKept = 256;

struct BestLogits {
  mx::array indices;  // uint32
  mx::array values;   // in x's dtype
};

// x is [..., K]; the results are [...], one per row.
BestLogits quantized_argmax(const mx::array& x,
                            QuantizedMatrix matrix,
                            const QuantizedOptions& options,
                            mx::StreamOrDevice stream);

// The results are [..., k], best first.
BestLogits quantized_topk(const mx::array& x,
                          QuantizedMatrix matrix,
                          int64_t k,
                          const QuantizedOptions& options,
                          mx::StreamOrDevice stream);

}  // namespace mlx_anvil

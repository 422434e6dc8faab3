// flash_attention of quantized keys and values.
#pragma once

#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"
#include "quantized_matmul/checks.h"

namespace mlx_anvil {

struct QuantizedKvFormats {
  QuantizedFormat k, v;
  bool operator==(const QuantizedKvFormats&) const = default;
};

// The arrays of a checked call. w, scales and biases have rank 4, [batch, kv_heads, kv_len, ...];
// affine scales and biases have the dtype of q.
struct QuantizedAttentionInputs {
  mx::array q;
  QuantizedMatrix k, v;
  std::optional<mx::array> mask;                  // each dimension is 1 or that of the scores
  std::optional<mx::array> sinks;                 // float32 [batch or 1, q_heads]
  std::optional<mx::array> sequences;             // int32 [sequences, 5] (sequences.h)
  std::optional<mx::array> pages = std::nullopt;  // int32 [batch, pages_per_sequence] (pages.h)
};

AttentionResult quantized_flash_attention(const mx::array& q,
                                          QuantizedMatrix k,
                                          QuantizedMatrix v,
                                          const QuantizedOptions& k_options,
                                          const QuantizedOptions& v_options,
                                          const AttentionOptions& options,
                                          mx::StreamOrDevice stream);

}  // namespace mlx_anvil

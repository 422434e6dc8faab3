// How the backward stores weights, P and dS, between its launches: which heads and queries are one
// chunk (metal/flash_attention/stored_weights.h).
#pragma once

#include <cstdint>

#include "flash_attention/problem.h"
#include "metal/flash_attention/params.h"

namespace mlx_anvil {

struct WeightChunks {
  int64_t heads;        // query heads, of batch * q_heads: whole groups
  int64_t rows;         // queries; if not all, a chunk has one group of heads
  int64_t stored_keys;  // of a row

  int64_t elements() const { return 2 * heads * rows * stored_keys; }
  bool has_all(const AttentionSizes& sizes) const {
    return rows >= sizes.q_len && heads >= sizes.batch * sizes.q_heads;
  }
};

// Returns the rows of the grid that queries take in blocks of `block`. In a packed batch these are
// more, since sequences start at multiples of kChunkRows, or of the block if it is larger.
int64_t rows_in_grid(int64_t q_len, int64_t block, int64_t packed_sequences);

// `cores` is 0 if unknown. Depends on nothing but its arguments.
WeightChunks weight_chunks(const AttentionSizes& sizes,
                           const AttentionParams& params,
                           int64_t itemsize,
                           int64_t cores,
                           int64_t bytes_per_core);

}  // namespace mlx_anvil

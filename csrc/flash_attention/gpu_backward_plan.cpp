#include "flash_attention/gpu_backward_plan.h"

#include <algorithm>

#include "common/integers.h"
#include "flash_attention/gpu_params.h"

namespace mlx_anvil {

namespace {

// Where the number of cores is unknown: that of an M1.
constexpr int64_t kFewestCores = 8;

// Keys that are stored for a row. With a window: those that some row of a square sees.
int64_t stored_keys(const AttentionSizes& sizes, const AttentionParams& params) {
  const int64_t keys = round_up(sizes.kv_len, kStoredRows);
  const int64_t band = int64_t{params.band_high} - params.band_low + 1;
  return std::min(keys, round_up(band + 2 * (kStoredRows - 1), kStoredRows));
}

}  // namespace

int64_t rows_in_grid(int64_t q_len, int64_t block, int64_t packed_sequences) {
  const int64_t unit = std::max<int64_t>(block, kChunkRows);
  return packed_sequences > 0 ? unit * blocks_of_rows(q_len, unit, packed_sequences) : q_len;
}

WeightChunks weight_chunks(const AttentionSizes& sizes,
                           const AttentionParams& params,
                           int64_t itemsize,
                           int64_t cores,
                           int64_t bytes_per_core) {
  WeightChunks chunks{};
  chunks.stored_keys = stored_keys(sizes, params);
  // Two chunks share the memory: one is computed while the other is multiplied.
  const int64_t bytes = (cores > 0 ? cores : kFewestCores) * bytes_per_core / 2;
  const int64_t bytes_of_block = kChunkRows * 2 * chunks.stored_keys * itemsize;
  const int64_t most = std::max<int64_t>(bytes / bytes_of_block, 1);  // blocks
  const int64_t blocks = std::max<int64_t>(ceil_div(sizes.q_len, kChunkRows), 1);
  const int64_t groups = sizes.batch * sizes.kv_heads;
  const int64_t of_group = blocks * sizes.group();
  if (of_group <= most) {
    // Chunks of equal size, as few as possible.
    const int64_t count = ceil_div(groups, most / of_group);
    chunks.heads = ceil_div(groups, count) * sizes.group();
    chunks.rows = blocks * kChunkRows;
    return chunks;
  }
  const int64_t count = ceil_div(blocks, std::max<int64_t>(most / sizes.group(), 1));
  chunks.heads = sizes.group();
  chunks.rows = ceil_div(blocks, count) * kChunkRows;
  return chunks;
}

}  // namespace mlx_anvil

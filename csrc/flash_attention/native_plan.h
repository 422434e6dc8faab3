// How a call is cut into work for threads: blocks of query rows, tiles of keys, scratch memory.
#pragma once

#include "flash_attention/cpu_kernels.h"

namespace mlx_anvil {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}

// Tiles that keep a block's operands in the second-level cache.
AttentionTile forward_tile(const AttentionSizes& sizes);

// All query rows of a call, cut into blocks whose rows share keys and values. The last block of
// every head comes early (a causal one costs the most), and costly and cheap blocks alternate.
class RowBlocks {
 public:
  // `tile.rows` is the most rows of a block.
  RowBlocks(const AttentionSizes& sizes, AttentionTile tile);

  int64_t count() const { return count_; }
  AttentionRows at(int64_t item) const;

  AttentionTile tile;  // rows: those of the largest block

 private:
  const AttentionSizes sizes_;
  int64_t heads_ = 1;    // of a block
  int64_t queries_ = 1;  // of a block
  int64_t head_blocks_ = 0;
  int64_t query_blocks_ = 0;
  int64_t count_ = 0;
};

const AttentionKernels& kernels_for(AttentionDtype dtype);

// Memory of this thread, kept for its next call; contents undefined.
void* thread_scratch(int64_t bytes);

}  // namespace mlx_anvil

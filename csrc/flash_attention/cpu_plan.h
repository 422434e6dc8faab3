// Splits a CPU call into work items: blocks of query rows, tiles of keys. Used by cpu.cpp and
// cpu_backward.cpp.
#pragma once

#include "common/integers.h"
#include "flash_attention/simd/kernels.h"

namespace mlx_anvil {

// Tile sizes that keep a block's operands in L2. The forward uses fewer rows if there would not be
// work for every thread otherwise; that does not change its results. `rows_in_all` counts those of
// all calls that share a loop.
AttentionTile forward_tile(const AttentionSizes& sizes, int64_t rows_in_all);
// One for which the bits of a row do not depend on the number of rows.
AttentionTile row_invariant_tile(const AttentionSizes& sizes, int64_t rows_in_all);
AttentionTile backward_tile(const AttentionSizes& sizes);

// All query rows of a call, in blocks whose rows share keys and values.
class RowBlocks {
 public:
  // `tile.rows` is the maximum number of rows of a block.
  RowBlocks(const AttentionSizes& sizes, AttentionTile tile);

  int64_t per_kv_head() const { return head_blocks_ * query_blocks_; }
  int64_t count() const { return sizes_.batch * sizes_.kv_heads * per_kv_head(); }

  // Returns block `index` of kv head `item % kv_heads` of batch `item / kv_heads`.
  AttentionRows at(int64_t item, int64_t index) const;

  // Returns the `turn`-th block in scheduling order. Late blocks of a head, the most expensive ones
  // with a causal mask, alternate with early blocks.
  AttentionRows in_turn(int64_t turn) const;

  AttentionTile tile;  // rows: those of the largest block

 private:
  const AttentionSizes sizes_;
  int64_t heads_ = 1;    // per block
  int64_t queries_ = 1;  // per block
  int64_t head_blocks_ = 0;
  int64_t query_blocks_ = 0;
};

}  // namespace mlx_anvil

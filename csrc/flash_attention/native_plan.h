// How a call is cut into work for threads: blocks of query rows, tiles of keys, scratch memory.
#pragma once

#include "common/rounding.h"
#include "flash_attention/cpu_kernels.h"

namespace mlx_anvil {

// Tiles that keep a block's operands in the second-level cache. Those of the forward have fewer
// rows where there would not be work for every thread otherwise, which does not change its results.
AttentionTile forward_tile(const AttentionSizes& sizes);
AttentionTile backward_tile(const AttentionSizes& sizes);

// All query rows of a call, cut into blocks whose rows share keys and values.
class RowBlocks {
 public:
  // `tile.rows` is the most rows of a block.
  RowBlocks(const AttentionSizes& sizes, AttentionTile tile);

  int64_t per_kv_head() const { return head_blocks_ * query_blocks_; }
  int64_t count() const { return sizes_.batch * sizes_.kv_heads * per_kv_head(); }

  // Block `index` of the kv head `item % kv_heads` of batch `item / kv_heads`.
  AttentionRows at(int64_t item, int64_t index) const;

  // Block `turn` of all, in an order for sharing out among threads: late blocks of a head (of which
  // causal ones cost the most) alternate with early ones.
  AttentionRows in_turn(int64_t turn) const;

  AttentionTile tile;  // rows: those of the largest block

 private:
  const AttentionSizes sizes_;
  int64_t heads_ = 1;    // of a block
  int64_t queries_ = 1;  // of a block
  int64_t head_blocks_ = 0;
  int64_t query_blocks_ = 0;
};

template <class Kernels>
const Kernels& kernels_for(AttentionDtype dtype, const ByAttentionDtype<Kernels>& table) {
  return dtype == AttentionDtype::kFloat32   ? table.float32
         : dtype == AttentionDtype::kFloat16 ? table.float16
                                             : table.bfloat16;
}

}  // namespace mlx_anvil

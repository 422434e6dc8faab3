#include "flash_attention/cpu_plan.h"

#include <algorithm>

#include "common/parallel.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kRowUnit = 8;  // rows of the largest product tile

int64_t widest(const AttentionSizes& sizes) {
  return std::max(sizes.head_dim, sizes.v_head_dim);
}

int64_t power_of_two_below(int64_t x) {
  int64_t power = 1;
  while (2 * power <= x) {
    power *= 2;
  }
  return power;
}

}  // namespace

AttentionTile row_invariant_tile(const AttentionSizes&, int64_t) {
  constexpr int64_t kStreamedKeys = 512;
  return {kStreamedRows, kStreamedKeys, /*streamed=*/true};
}

AttentionTile forward_tile(const AttentionSizes& sizes, int64_t rows_in_all) {
  constexpr int64_t kRowElements = 32768;
  constexpr int64_t kKeyElements = 16384;
  if (sizes.kv_heads > 0 && sizes.group() * sizes.q_len <= kStreamedRows) {
    return row_invariant_tile(sizes, rows_in_all);
  }
  const int64_t most_rows = std::max<int64_t>(32, rows_in_all / (4 * max_threads()));
  const int64_t rows = power_of_two_below(kRowElements / widest(sizes));
  const int64_t keys = power_of_two_below(kKeyElements / widest(sizes));
  return {std::min(std::clamp<int64_t>(rows, 64, 256), most_rows),
          std::clamp<int64_t>(keys, 64, 256)};
}

AttentionTile backward_tile(const AttentionSizes& sizes) {
  constexpr int64_t kElements = 16384;
  const int64_t size = power_of_two_below(kElements / widest(sizes));
  return {std::clamp<int64_t>(size, 64, 128), std::clamp<int64_t>(size, 64, 128)};
}

RowBlocks::RowBlocks(const AttentionSizes& sizes, AttentionTile tile) : tile(tile), sizes_(sizes) {
  if (sizes.batch * sizes.q_heads * sizes.q_len == 0) {
    return;
  }
  const int64_t group = sizes.group();
  head_blocks_ = ceil_div(group, tile.rows);
  heads_ = ceil_div(group, head_blocks_);
  query_blocks_ = ceil_div(sizes.q_len, std::max<int64_t>(1, tile.rows / heads_));
  queries_ = ceil_div(sizes.q_len, query_blocks_);
  if (queries_ > kRowUnit) {
    queries_ = round_up(queries_, kRowUnit);
  }
  query_blocks_ = ceil_div(sizes.q_len, queries_);
  this->tile.rows = heads_ * queries_;
}

AttentionRows RowBlocks::at(int64_t item, int64_t index) const {
  const int64_t head_block = index / query_blocks_;
  AttentionRows rows;
  rows.batch = item / sizes_.kv_heads;
  rows.kv_head = item % sizes_.kv_heads;
  rows.first_head = rows.kv_head * sizes_.group() + head_block * heads_;
  rows.heads = std::min(heads_, sizes_.group() - head_block * heads_);
  rows.first_query = index % query_blocks_ * queries_;
  rows.queries = std::min(queries_, sizes_.q_len - rows.first_query);
  return rows;
}

AttentionRows RowBlocks::in_turn(int64_t turn) const {
  const int64_t step = turn % query_blocks_;
  const int64_t query_block = step % 2 == 0 ? query_blocks_ - 1 - step / 2 : step / 2;
  return at(turn / per_kv_head(), turn % per_kv_head() - step + query_block);
}

}  // namespace mlx_anvil

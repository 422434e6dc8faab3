#include "flash_attention/native_plan.h"

#include <algorithm>
#include <memory>
#include <new>

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

AttentionTile forward_tile(const AttentionSizes& sizes) {
  constexpr int64_t kRowElements = 32768;
  constexpr int64_t kKeyElements = 16384;
  return {std::clamp<int64_t>(power_of_two_below(kRowElements / widest(sizes)), 64, 256),
          std::clamp<int64_t>(power_of_two_below(kKeyElements / widest(sizes)), 64, 256)};
}

RowBlocks::RowBlocks(const AttentionSizes& sizes, AttentionTile tile) : tile(tile), sizes_(sizes) {
  if (sizes.batch * sizes.q_heads * sizes.q_len == 0) {
    return;
  }
  const int64_t group = sizes.group();
  // Fewer rows where there would not be work for every thread otherwise.
  const int64_t total = sizes.batch * sizes.q_heads * sizes.q_len;
  const int64_t most = std::clamp<int64_t>(total / (4 * max_threads()), 32, tile.rows);
  head_blocks_ = ceil_div(group, most);
  heads_ = ceil_div(group, head_blocks_);
  query_blocks_ = ceil_div(sizes.q_len, std::max<int64_t>(1, most / heads_));
  queries_ = ceil_div(sizes.q_len, query_blocks_);
  if (queries_ > kRowUnit) {
    queries_ = round_up(queries_, kRowUnit);
  }
  query_blocks_ = ceil_div(sizes.q_len, queries_);
  count_ = sizes.batch * sizes.kv_heads * head_blocks_ * query_blocks_;
  this->tile.rows = heads_ * queries_;
}

AttentionRows RowBlocks::at(int64_t item) const {
  const int64_t turn = item % query_blocks_;
  const int64_t block = turn % 2 == 0 ? query_blocks_ - 1 - turn / 2 : turn / 2;
  const int64_t head_block = item / query_blocks_ % head_blocks_;
  const int64_t head_item = item / query_blocks_ / head_blocks_;
  AttentionRows rows;
  rows.batch = head_item / sizes_.kv_heads;
  rows.kv_head = head_item % sizes_.kv_heads;
  rows.first_head = rows.kv_head * sizes_.group() + head_block * heads_;
  rows.heads = std::min(heads_, sizes_.group() - head_block * heads_);
  rows.first_query = block * queries_;
  rows.queries = std::min(queries_, sizes_.q_len - rows.first_query);
  return rows;
}

const AttentionKernels& kernels_for(AttentionDtype dtype) {
  const AttentionKernelTable& table = attention_kernels();
  return dtype == AttentionDtype::kFloat32   ? table.float32
         : dtype == AttentionDtype::kFloat16 ? table.float16
                                             : table.bfloat16;
}

void* thread_scratch(int64_t bytes) {
  constexpr std::align_val_t kAlignment{4096};
  struct Free {
    void operator()(char* memory) const { ::operator delete[](memory, kAlignment); }
  };
  thread_local std::unique_ptr<char[], Free> memory;
  thread_local int64_t capacity = 0;
  if (bytes > capacity) {
    memory.reset();
    memory.reset(static_cast<char*>(::operator new[](bytes, kAlignment)));
    capacity = bytes;
  }
  return memory.get();
}

}  // namespace mlx_anvil

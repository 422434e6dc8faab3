// CPU driver of the attention forward: row blocks, split keys and threads.
#include "flash_attention/cpu.h"

#include <algorithm>
#include <memory>

#include "common/parallel.h"
#include "common/thread_scratch.h"
#include "flash_attention/cpu_plan.h"
#include "flash_attention/simd/kernels.h"

namespace mlx_anvil {

namespace {

// Split-K for decoding, which is bound by reading keys and values. The parts do not depend on the
// number of threads, so neither do the results.
struct Splits {
  int64_t count;
  int64_t keys;  // of all splits but the last
};

Splits plan_splits(const AttentionSizes& sizes, int64_t items, int64_t tile_keys) {
  constexpr int64_t kMostItems = 64;
  constexpr int64_t kLeastKeys = 512;
  if (sizes.q_len > kDecodeRows) {
    return {1, sizes.kv_len};
  }
  const int64_t wanted =
      std::clamp<int64_t>(sizes.kv_len / kLeastKeys, 1, std::max<int64_t>(1, kMostItems / items));
  const int64_t keys = std::max(tile_keys, round_up(ceil_div(sizes.kv_len, wanted), tile_keys));
  return {std::max<int64_t>(1, ceil_div(sizes.kv_len, keys)), keys};
}

void forward_split(const AttentionForwardKernels& kernels,
                   const AttentionForwardArgs& args,
                   const RowBlocks& blocks,
                   const Splits& splits) {
  const int64_t row_size = args.sizes.v_head_dim + 2;
  const int64_t item_size = splits.count * blocks.tile.rows * row_size;
  const std::unique_ptr<float[]> partials(new float[blocks.count() * item_size]);
  const auto partial = [&](int64_t item, int64_t split) {
    const AttentionRows rows = blocks.in_turn(item);
    return partials.get() + item * item_size + split * rows.heads * rows.queries * row_size;
  };
  const int64_t scratch_bytes = kernels.scratch_bytes(args.sizes, blocks.tile);
  parallel_for(blocks.count() * splits.count, 1, [&](int64_t begin, int64_t end) {
    void* const scratch = thread_scratch(scratch_bytes);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t item = i / splits.count, split = i % splits.count;
      const KeyRange keys = {split * splits.keys,
                             std::min((split + 1) * splits.keys, args.sizes.kv_len)};
      kernels.forward(args, blocks.in_turn(item), keys, blocks.tile, partial(item, split), scratch);
    }
  });
  for (int64_t item = 0; item < blocks.count(); ++item) {
    kernels.combine(args, blocks.in_turn(item), partial(item, 0), splits.count);
  }
}

}  // namespace

void attention_forward_cpu(const AttentionForwardArgs& args) {
  const AttentionForwardKernels& kernels = attention_forward_kernels()[args.dtype];
  const AttentionTile tile = forward_tile(args.sizes);
  const RowBlocks blocks(args.sizes, tile);
  if (blocks.count() == 0) {
    return;
  }
  const Splits splits = plan_splits(args.sizes, blocks.count(), tile.keys);
  if (splits.count > 1) {
    forward_split(kernels, args, blocks, splits);
    return;
  }
  const int64_t scratch_bytes = kernels.scratch_bytes(args.sizes, blocks.tile);
  parallel_for(blocks.count(), 1, [&](int64_t begin, int64_t end) {
    void* const scratch = thread_scratch(scratch_bytes);
    for (int64_t item = begin; item < end; ++item) {
      kernels.forward(args, blocks.in_turn(item), {0, args.sizes.kv_len}, blocks.tile, nullptr,
                      scratch);
    }
  });
}

}  // namespace mlx_anvil

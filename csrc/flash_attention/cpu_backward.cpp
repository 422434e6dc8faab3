// CPU driver of the attention backward, with two schedules. Both add the row blocks' contributions
// to a key in the same order, so they return the same bits for any number of threads.
#include <algorithm>

#include "common/parallel.h"
#include "common/thread_scratch.h"
#include "flash_attention/cpu.h"
#include "flash_attention/cpu_plan.h"
#include "flash_attention/cpu_sequences.h"
#include "flash_attention/simd/kernels.h"

namespace mlx_anvil {

namespace {

class BackwardCall {
 public:
  explicit BackwardCall(const AttentionBackwardArgs& args)
      : args_(args),
        kernels_(attention_backward_kernels()[args.dtype]),
        blocks_(args.sizes, backward_tile(args.sizes)),
        heads_(args.sizes.batch * args.sizes.kv_heads),
        scratch_bytes_(kernels_.scratch_bytes(args.sizes, blocks_.tile)) {}

  void run() const {
    const bool rows_wanted = args_.d_q.data || args_.d_mask;
    const bool keys_wanted = args_.d_k.data;
    if (rows_wanted && keys_wanted && one_pass_pays()) {
      key_pass(args_.sizes.kv_len, /*row_gradients=*/true);
    } else {
      if (rows_wanted) {
        row_pass();
      }
      if (keys_wanted) {
        key_pass(std::max<int64_t>(kKeysPerItem, blocks_.tile.keys), /*row_gradients=*/false);
      }
    }
  }

  void sink_pass() const {
    parallel_for(args_.sizes.batch * args_.sizes.q_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        kernels_.sink_gradient(args_, item / args_.sizes.q_heads, item % args_.sizes.q_heads);
      }
    });
  }

 private:
  static constexpr int64_t kKeysPerItem = 256;
  static constexpr int64_t kMostKeyGradientBytes = 4 << 20;  // per thread

  // One pass takes five matrix products instead of seven. But its work items are whole heads, and
  // it needs sums for all keys.
  bool one_pass_pays() const {
    const int threads = max_threads();
    const bool busy = heads_ >= 4 * threads || heads_ % threads == 0;
    return busy &&
           kernels_.key_gradient_bytes(args_.sizes, args_.sizes.kv_len) <= kMostKeyGradientBytes;
  }

  void row_pass() const {
    parallel_for(blocks_.count(), 1, [&](int64_t begin, int64_t end) {
      void* const scratch = thread_scratch(scratch_bytes_);
      for (int64_t turn = begin; turn < end; ++turn) {
        kernels_.backward(args_, blocks_.in_turn(turn), {0, args_.sizes.kv_len}, blocks_.tile,
                          /*row_gradients=*/true, nullptr, scratch);
      }
    });
  }

  // A work item is all rows of a kv head against `keys_per_item` keys.
  void key_pass(int64_t keys_per_item, bool row_gradients) const {
    const int64_t kv_len = args_.sizes.kv_len;
    const int64_t ranges = kv_len == 0 ? (row_gradients ? 1 : 0) : ceil_div(kv_len, keys_per_item);
    const int64_t sum_bytes =
        round_up(kernels_.key_gradient_bytes(args_.sizes, std::min(keys_per_item, kv_len)), 64);
    parallel_for(heads_ * ranges, 1, [&](int64_t begin, int64_t end) {
      char* const sums = static_cast<char*>(thread_scratch(sum_bytes + scratch_bytes_));
      for (int64_t item = begin; item < end; ++item) {
        const int64_t head = item / ranges;
        const int64_t first = item % ranges * keys_per_item;
        const KeyRange keys = {first, std::min(first + keys_per_item, kv_len)};
        kernels_.clear_key_gradients(args_.sizes, keys, sums);
        for (int64_t i = 0; i < blocks_.per_kv_head(); ++i) {
          kernels_.backward(args_, blocks_.at(head, i), keys, blocks_.tile, row_gradients, sums,
                            sums + sum_bytes);
        }
        kernels_.store_key_gradients(args_, head / args_.sizes.kv_heads,
                                     head % args_.sizes.kv_heads, keys, sums);
      }
    });
  }

  const AttentionBackwardArgs args_;
  const AttentionBackwardKernels& kernels_;
  const RowBlocks blocks_;
  const int64_t heads_;
  const int64_t scratch_bytes_;
};

}  // namespace

void attention_backward_cpu(const AttentionBackwardArgs& args) {
  if (args.config.is_ragged) {
    clear_results(args);
  }
  for (const AttentionBackwardArgs& own : calls_of(args)) {
    BackwardCall(own).run();
  }
  if (args.d_sinks) {  // a row of padding has its sink alone
    BackwardCall(args).sink_pass();
  }
}

}  // namespace mlx_anvil

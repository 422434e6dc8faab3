// CPU driver of an attention forward: row blocks, split keys and threads. `Args` needs calls_of()
// and clear_results() (cpu_sequences.h).
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "common/parallel.h"
#include "common/thread_scratch.h"
#include "flash_attention/cpu_plan.h"
#include "flash_attention/cpu_sequences.h"

namespace mlx_anvil {

// How kernels cut a call.
struct ForwardPolicy {
  AttentionTile (*tile)(const AttentionSizes& sizes, int64_t rows_in_all);
  int64_t most_queries_of_split;  // with more, the keys are not split
  int64_t least_keys_of_split;
  int64_t keys_of_split = 0;  // a fixed number; 0: as the call's size suggests
};

// Split-K for decoding, which is bound by reading keys and values. The parts do not depend on the
// number of threads, so neither do the results.
struct Splits {
  int64_t count;
  int64_t keys;  // of all splits but the last
};

inline Splits plan_splits(const ForwardPolicy& policy,
                          const AttentionSizes& sizes,
                          int64_t items,
                          int64_t tile_keys) {
  constexpr int64_t kMostItems = 64;
  if (policy.keys_of_split > 0) {
    return {std::max<int64_t>(1, ceil_div(sizes.kv_len, policy.keys_of_split)),
            policy.keys_of_split};
  }
  if (sizes.q_len > policy.most_queries_of_split) {
    return {1, sizes.kv_len};
  }
  const int64_t wanted = std::clamp<int64_t>(sizes.kv_len / policy.least_keys_of_split, 1,
                                             std::max<int64_t>(1, kMostItems / items));
  const int64_t keys = std::max(tile_keys, round_up(ceil_div(sizes.kv_len, wanted), tile_keys));
  return {std::max<int64_t>(1, ceil_div(sizes.kv_len, keys)), keys};
}

// One call of the kernels, cut into work items: blocks of rows, each with a part of the keys.
template <class Args>
class ForwardCall {
 public:
  ForwardCall(const ForwardKernels<Args>& kernels,
              const ForwardPolicy& policy,
              const Args& args,
              int64_t rows_in_all)
      : kernels_(kernels), args_(args), blocks_(args.sizes, policy.tile(args.sizes, rows_in_all)) {
    if (blocks_.count() == 0) {
      return;
    }
    splits_ = plan_splits(policy, args.sizes, blocks_.count(), blocks_.tile.keys);
    if (splits_.count > 1) {
      partials_.reset(new float[blocks_.count() * partials_of_block()]);
    }
  }

  int64_t items() const { return blocks_.count() * splits_.count; }
  int64_t scratch_bytes() const { return kernels_.scratch_bytes(args_, blocks_.tile); }

  void run(int64_t item, void* scratch) const {
    const int64_t block = item / splits_.count, split = item % splits_.count;
    const KeyRange keys = {split * splits_.keys,
                           std::min((split + 1) * splits_.keys, args_.sizes.kv_len)};
    kernels_.forward(args_, blocks_.in_turn(block), keys, blocks_.tile, partial(block, split),
                     scratch);
  }

  // Call after all items.
  void combine() const {
    if (splits_.count == 1) {
      return;
    }
    constexpr int64_t kNumbersOfThread = 1 << 16;
    const int64_t rows = blocks_.tile.rows, of_row = splits_.count * row_size();
    const int64_t grain = std::max<int64_t>(1, kNumbersOfThread / of_row);
    parallel_for(blocks_.count() * rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t block = row / rows;
        kernels_.combine(args_, blocks_.in_turn(block), row % rows, partial(block, 0),
                         splits_.count);
      }
    });
  }

 private:
  int64_t row_size() const { return args_.sizes.v_head_dim + 2; }
  int64_t partials_of_block() const { return splits_.count * blocks_.tile.rows * row_size(); }

  // Null if the keys are not split.
  float* partial(int64_t block, int64_t split) const {
    if (splits_.count == 1) {
      return nullptr;
    }
    const AttentionRows rows = blocks_.in_turn(block);
    return partials_.get() + block * partials_of_block() +
           split * rows.heads * rows.queries * row_size();
  }

  const ForwardKernels<Args>& kernels_;
  const Args args_;
  const RowBlocks blocks_;
  Splits splits_ = {1, 0};
  std::unique_ptr<float[]> partials_;
};

// The sequences of a ragged batch share one loop, so that threads get work by actual lengths.
template <class Args>
void forward_cpu(const ForwardKernels<Args>& kernels,
                 const ForwardPolicy& policy,
                 const Args& args) {
  if (args.config.is_ragged) {
    clear_results(args);
  }
  const std::vector<Args> of_sequences = calls_of(args);
  int64_t rows_in_all = 0;
  for (const Args& own : of_sequences) {
    rows_in_all += own.sizes.batch * own.sizes.q_heads * own.sizes.q_len;
  }
  std::vector<ForwardCall<Args>> calls;
  std::vector<int64_t> ends;  // of each call's items
  int64_t items = 0, scratch_bytes = 0;
  for (const Args& own : of_sequences) {
    const ForwardCall<Args>& call = calls.emplace_back(kernels, policy, own, rows_in_all);
    if (call.items() > 0) {
      scratch_bytes = std::max(scratch_bytes, call.scratch_bytes());
    }
    ends.push_back(items += call.items());
  }
  parallel_for(items, 1, [&](int64_t begin, int64_t end) {
    void* const scratch = thread_scratch(scratch_bytes);
    auto call = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (int64_t item = begin; item < end; ++item) {
      while (item >= ends[call]) {
        ++call;
      }
      calls[call].run(item - (ends[call] - calls[call].items()), scratch);
    }
  });
  for (const ForwardCall<Args>& call : calls) {
    call.combine();
  }
}

}  // namespace mlx_anvil

// CPU driver of moe_permute and moe_combine: the counting sort, and the split of rows among
// threads.
#include "moe/cpu.h"

#include <algorithm>
#include <cstring>

#include "common/integers.h"
#include "common/parallel.h"
#include "common/thread_scratch.h"
#include "moe/simd/kernels.h"

namespace mlx_anvil {

namespace {

// The least work for a thread, in bytes that it reads and writes.
constexpr int64_t kGrainBytes = 1 << 17;

int64_t grain_of(int64_t bytes_each) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes_each));
}

// Negative ids count from the end; ids out of range clamp.
struct ExpertOf {
  const void* ids;
  bool is_signed;
  int64_t experts;

  int64_t operator()(int64_t pair) const {
    const int64_t id = is_signed ? int64_t{static_cast<const int32_t*>(ids)[pair]}
                                 : int64_t{static_cast<const uint32_t*>(ids)[pair]};
    return std::clamp<int64_t>(id < 0 ? id + experts : id, 0, experts - 1);
  }
};

// Sorts one batch: counts the pairs of each expert, sums the counts, then gives each pair the next
// place of its expert.
void sort_batch(const MoeSortArgs& args, int64_t batch) {
  const int64_t pairs = args.sizes.pairs(), experts = args.experts, first = batch * pairs;
  const ExpertOf expert_of{args.ids, args.ids_are_signed, experts};
  int32_t* const offsets = args.offsets + batch * (experts + 1);
  int32_t *const order = args.order + first, *const sorted = args.sorted + first;
  std::fill_n(offsets, experts + 1, 0);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    ++offsets[expert_of(first + pair) + 1];
  }
  for (int64_t expert = 0; expert < experts; ++expert) {
    offsets[expert + 1] += offsets[expert];
  }
  const int64_t bytes = experts * int64_t{sizeof(int32_t)};
  auto* const next = static_cast<int32_t*>(thread_scratch(bytes));
  std::memcpy(next, offsets, bytes);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t expert = expert_of(first + pair);
    const int32_t place = next[expert]++;
    order[place] = static_cast<int32_t>(pair);
    sorted[place] = static_cast<int32_t>(expert);
    args.inverse[first + pair] = place;
  }
}

}  // namespace

void moe_sort_cpu(const MoeSortArgs& args) {
  const int64_t work = 16 * (args.sizes.pairs() + args.experts);
  parallel_for(args.sizes.batches, grain_of(work), [&](int64_t begin, int64_t end) {
    for (int64_t batch = begin; batch < end; ++batch) {
      sort_batch(args, batch);
    }
  });
}

void moe_spread_cpu(const MoeSpreadArgs& args) {
  const auto kernel = moe_spread_kernels().of;
  parallel_for(args.sizes.all_pairs(), grain_of(2 * args.row_bytes),
               [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void moe_combine_cpu(KernelDtype dtype, const MoeCombineArgs& args) {
  const MoeSizes& sizes = args.sizes;
  const auto kernel = moe_combine_kernels().of[dtype];
  const int64_t bytes = moe_combine_kernels().scratch_bytes(sizes.chosen);
  const int64_t columns = std::min(sizes.columns, kMoePieceColumns);
  const int64_t pieces = sizes.batches * sizes.tokens * ceil_div(sizes.columns, kMoePieceColumns);
  const int64_t work = (sizes.chosen + 2) * columns * element_size(dtype);
  parallel_for(pieces, grain_of(work), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end, thread_scratch(bytes));
  });
}

void moe_backward_cpu(KernelDtype dtype, const MoeBackwardArgs& args) {
  const MoeSizes& sizes = args.sizes;
  const auto kernel = moe_backward_kernels().of[dtype];
  const int64_t work = (2 * sizes.chosen + 2) * sizes.columns * element_size(dtype);
  parallel_for(sizes.batches * sizes.tokens, grain_of(work),
               [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace mlx_anvil

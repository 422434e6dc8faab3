// CPU driver: blocks of channels on threads, and sums over channels.
#include "selective_scan/cpu.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "common/integers.h"
#include "common/parallel.h"
#include "common/sum_rows.h"
#include "common/thread_scratch.h"

namespace mlx_anvil {

namespace {

// Updates of a state that pay for waking a thread.
constexpr int64_t kGrain = 1 << 15;

// Tasks of a backward, each with sums of its own. They depend on the sizes only, so that every run
// gives the same bits.
constexpr int64_t kMostTasks = 32;

int64_t grain_of(const ScanSizes& sizes, int64_t channels) {
  return ceil_div(kGrain, std::max<int64_t>(sizes.steps * sizes.states * channels, 1));
}

}  // namespace

void scan_forward_cpu(const ScanForwardArgs& args) {
  const ScanKernels& kernels = scan_kernels()[args.dtype];
  const int64_t blocks = ceil_div(args.sizes.channels, kernels.block_channels);
  const int64_t bytes = kernels.forward_scratch_bytes(args.sizes);
  parallel_for(args.sizes.batch * blocks, grain_of(args.sizes, kernels.block_channels),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   kernels.forward(args, i / blocks, i % blocks, thread_scratch(bytes));
                 }
               });
}

void scan_backward_cpu(const ScanBackwardArgs& args, void* d_b, void* d_c) {
  const ScanKernels& kernels = scan_kernels()[args.dtype];
  const int64_t blocks = ceil_div(args.sizes.channels, kernels.block_channels);
  const int64_t tasks = std::min(blocks, kMostTasks);
  const int64_t count = args.sizes.batch * args.sizes.steps * args.sizes.states;
  const auto sums = std::make_unique_for_overwrite<float[]>(2 * tasks * count);
  const int64_t bytes = kernels.backward_scratch_bytes(args.sizes);
  const int64_t channels_of_task = ceil_div(args.sizes.channels, std::max<int64_t>(tasks, 1));
  parallel_for(tasks, grain_of(args.sizes, args.sizes.batch * channels_of_task),
               [&](int64_t begin, int64_t end) {
                 for (int64_t task = begin; task < end; ++task) {
                   const ScanSums own = {sums.get() + task * count,
                                         sums.get() + (tasks + task) * count};
                   std::fill_n(own.b, count, 0.0f);
                   std::fill_n(own.c, count, 0.0f);
                   kernels.backward(args, task * blocks / tasks, (task + 1) * blocks / tasks, own,
                                    thread_scratch(bytes));
                 }
               });
  for (const auto& [from, to] : {std::pair{sums.get(), d_b}, {sums.get() + tasks * count, d_c}}) {
    sum_rows({1, tasks, count, from, to, KernelDtype::kFloat32, args.dtype});
  }
}

}  // namespace mlx_anvil

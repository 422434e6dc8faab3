// CPU driver of softmax_topk: splits rows among threads.
#include "softmax_topk/cpu.h"

#include <algorithm>

#include "common/parallel.h"
#include "common/thread_scratch.h"

namespace mlx_anvil {

namespace {

// Minimum work per thread in experts, and the fixed cost of a row in experts.
constexpr int64_t kGrain = 32768;
constexpr int64_t kRowExperts = 64;

template <class Table, class Args>
void run_rows(const Table& table, const RouterProblem& problem, const Args& args) {
  const auto kernel = table.of[problem.dtype];
  const int64_t bytes = table.scratch_bytes(args.experts, args.chosen);
  const int64_t grain = std::max<int64_t>(1, kGrain / (args.experts + kRowExperts));
  parallel_for(problem.rows, grain, [&](int64_t begin, int64_t end) {
    kernel(args, begin, end, thread_scratch(bytes));
  });
}

}  // namespace

void router_forward_cpu(const RouterProblem& problem, const RouterForwardArgs& args) {
  run_rows(router_forward_kernels(), problem, args);
}

void router_backward_cpu(const RouterProblem& problem, const RouterBackwardArgs& args) {
  run_rows(router_backward_kernels(), problem, args);
}

}  // namespace mlx_anvil

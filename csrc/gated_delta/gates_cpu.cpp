#include "gated_delta/gates_cpu.h"

#include <algorithm>

#include "common/aligned_floats.h"
#include "common/integers.h"
#include "common/parallel.h"
#include "common/sum_rows.h"
#include "common/thread_scratch.h"

namespace mlx_anvil {

namespace {

// Least numbers per thread.
constexpr int64_t kGatesGrain = 8192;
constexpr int64_t kGatesBackwardGrain = 4096;
// Runs of rows that keep sums of their own. Sums over kGatesRowsOfSum rows are added up without
// compensation.
constexpr int64_t kGatesMostRuns = 64;
constexpr int64_t kGatesRowsOfSum = 32;

int64_t rows_of(int64_t numbers, const DeltaGatesArgs& args) {
  return ceil_div(numbers, std::max<int64_t>(1, args.columns()));
}

float* scratch_rows(int64_t count, const DeltaGatesArgs& args) {
  const int64_t bytes = count * args.row_size() * static_cast<int64_t>(sizeof(float));
  return static_cast<float*>(thread_scratch(bytes));
}

// Adds up the sums of each run: two rows, of the bias and of the columns' A_log.
void add_up(
    const DeltaGatesArgs& args, const float* sums, int64_t runs, void* d_a_log, void* d_dt_bias) {
  const auto dtype_of = [&](bool is_float32) {
    return is_float32 ? KernelDtype::kFloat32 : args.dtype;
  };
  const AlignedFloats totals(2 * args.row_size());
  sum_rows({.outer = 1,
            .rows = runs,
            .inner = 2 * args.row_size(),
            .in = sums,
            .out = totals.get(),
            .in_dtype = KernelDtype::kFloat32,
            .out_dtype = KernelDtype::kFloat32});
  sum_rows({.outer = 1,
            .rows = 1,
            .inner = args.columns(),
            .in = totals.get(),
            .out = d_dt_bias,
            .in_dtype = KernelDtype::kFloat32,
            .out_dtype = dtype_of(args.bias_is_float32)});
  sum_rows({.outer = args.heads,
            .rows = args.channels,
            .inner = 1,
            .in = totals.get() + args.row_size(),
            .out = d_a_log,
            .in_dtype = KernelDtype::kFloat32,
            .out_dtype = dtype_of(args.log_is_float32)});
}

}  // namespace

void gated_delta_gates_cpu(const DeltaGatesForwardArgs& args) {
  const DeltaGatesForwardKernel kernel = gated_delta_gates_forward_kernels()[args.dtype];
  parallel_for(args.rows, rows_of(kGatesGrain, args), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end, scratch_rows(2, args));
  });
}

void gated_delta_gates_backward_cpu(const DeltaGatesBackwardArgs& args,
                                    void* d_a_log,
                                    void* d_dt_bias) {
  const DeltaGatesBackwardKernel kernel = gated_delta_gates_backward_kernels()[args.dtype];
  const int64_t grain = rows_of(kGatesBackwardGrain, args);
  if (!d_dt_bias) {
    parallel_for(args.rows, grain, [&](int64_t begin, int64_t end) {
      kernel(args, begin, end, scratch_rows(2, args), nullptr);
    });
    return;
  }
  // Runs do not depend on the number of threads, so neither do the sums.
  const int64_t rows_of_run = std::max(grain, ceil_div(args.rows, kGatesMostRuns));
  const int64_t runs = std::max<int64_t>(1, ceil_div(args.rows, rows_of_run));
  const int64_t both = 2 * args.row_size();
  const AlignedFloats sums(runs * both);
  parallel_for(runs, 1, [&](int64_t begin, int64_t end) {
    float *const weights = scratch_rows(6, args), *const few = weights + both;
    float* const lost = few + both;
    for (int64_t run = begin; run < end; ++run) {
      float* const own = sums.get() + run * both;
      std::fill_n(own, both, 0.0f);
      std::fill_n(lost, both, 0.0f);
      const int64_t last = std::min((run + 1) * rows_of_run, args.rows);
      for (int64_t row = run * rows_of_run; row < last; row += kGatesRowsOfSum) {
        std::fill_n(few, both, 0.0f);
        kernel(args, row, std::min(row + kGatesRowsOfSum, last), weights, few);
        add_compensated(few, both, own, lost);
      }
    }
  });
  add_up(args, sums.get(), runs, d_a_log, d_dt_bias);
}

}  // namespace mlx_anvil

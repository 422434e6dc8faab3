// CPU driver of the norms: threads, parts and scratch memory.
#include "norm/cpu.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "common/aligned_floats.h"
#include "common/integers.h"
#include "common/parallel.h"
#include "common/sum_rows.h"
#include "common/thread_scratch.h"

namespace mlx_anvil {

namespace {

// Minimum elements per thread: about 15 us of work, enough to pay for waking a thread.
constexpr int64_t kGrain = 32768;

// A weight gradient is summed in at most this many parts of at least a grain each. The parts do not
// depend on the number of threads, so neither does the result.
constexpr int64_t kMostRunsOfGroup = 64;
constexpr int64_t kRunRows = 256;

int64_t rows_of_grain(int64_t columns) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns));
}

// The weight and layer_norm's bias of every group, widened for the kernels. Absent ones become ones
// and zeros.
class WideVectors {
 public:
  WideVectors(const NormProblem& problem, int64_t columns)
      : kernels_(norm_vector_kernels().of[problem.dtype]),
        padded_(ceil_div(columns, norm_vector_kernels().block) * norm_vector_kernels().block),
        bias_at_(problem.groups * padded_),
        floats_(bias_at_ * (problem.centred ? 2 : 1)) {
    const NormVectors& vectors = problem.vectors;
    if (vectors.weight.data) {
      widen(vectors.weight, problem, vectors.weight_offset, columns, floats_.get());
    } else {
      std::fill_n(floats_.get(), bias_at_, 1.0f);
    }
    if (problem.centred && vectors.bias.data) {
      widen(vectors.bias, problem, 0, columns, floats_.get() + bias_at_);
    } else if (problem.centred) {
      std::fill_n(floats_.get() + bias_at_, bias_at_, 0.0f);
    }
  }

  int64_t padded_columns() const { return padded_; }
  const float* weight() const { return floats_.get(); }
  const float* bias() const { return floats_.get() + bias_at_; }  // layer_norm only

 private:
  void widen(const NormOperand& from,
             const NormProblem& problem,
             float offset,
             int64_t columns,
             float* to) {
    const bool is_float32 = problem.vectors.are_float32;
    const int64_t bytes = is_float32 ? 4 : element_size(problem.dtype);
    std::vector<char> gathered(from.rows.column_stride == 1 ? 0 : columns * bytes);
    for (int64_t group = 0; group < problem.groups; ++group) {
      const int64_t at = norm_row_offset(&from.rows, static_cast<uint32_t>(group));
      const char* row = static_cast<const char*>(from.data) + at * bytes;
      if (!gathered.empty()) {
        for (int64_t i = 0; i < columns; ++i) {
          std::memcpy(&gathered[i * bytes], row + i * from.rows.column_stride * bytes, bytes);
        }
        row = gathered.data();
      }
      kernels_.widen(row, is_float32, offset, columns, to + group * padded_);
    }
  }

  const NormVectorKernels& kernels_;
  const int64_t padded_, bias_at_;
  const AlignedFloats floats_;
};

// Scratch memory of a kernel in bytes.
int64_t scratch_bytes(std::initializer_list<const NormOperand*> operands,
                      bool stream_outputs,
                      int64_t row_bytes) {
  const bool gathers = std::any_of(
      operands.begin(), operands.end(),
      [](const NormOperand* operand) { return operand->data && operand->rows.column_stride != 1; });
  return gathers || stream_outputs ? kNormScratchRows * row_bytes : 0;
}

}  // namespace

void norm_forward_cpu(const NormProblem& problem, NormForwardArgs args) {
  const WideVectors vectors(problem, args.columns);
  args.padded_columns = vectors.padded_columns();
  args.weight = vectors.weight();
  args.bias = vectors.bias();
  args.rows_per_group = problem.rows / problem.groups;
  const int64_t bytes = scratch_bytes({&args.x, &args.residual, &args.gate}, args.stream_outputs,
                                      args.columns * element_size(problem.dtype));
  const NormKernels<NormForwardKernel>& kernels = norm_forward_kernels()[problem.dtype];
  const NormForwardKernel kernel = problem.centred ? kernels.layer : kernels.rms;
  parallel_for(problem.rows, rows_of_grain(args.columns), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end, thread_scratch(bytes));
  });
}

void norm_backward_cpu(const NormProblem& problem,
                       NormBackwardArgs args,
                       void* d_weight,
                       void* d_bias) {
  const WideVectors vectors(problem, args.columns);
  const int64_t columns = args.columns, padded = vectors.padded_columns();
  const int64_t rows_per_group = problem.rows / problem.groups;
  args.padded_columns = padded;
  args.weight = vectors.weight();
  args.rows_per_group = rows_per_group;

  const int64_t rows_per_part =
      std::max(ceil_div(rows_per_group, kMostRunsOfGroup), rows_of_grain(columns));
  const int64_t parts = ceil_div(rows_per_group, rows_per_part);  // per group
  const int64_t all_parts = problem.groups * parts;
  const AlignedFloats sums(all_parts * padded * ((d_weight != nullptr) + (d_bias != nullptr)));
  const auto sums_from = [&](int64_t part) {
    const int64_t bias_at = d_weight ? all_parts * padded : 0;
    return NormSums{d_weight ? sums.get() + part * padded : nullptr,
                    d_bias ? sums.get() + bias_at + part * padded : nullptr};
  };

  const int64_t bytes = scratch_bytes({&args.h, &args.gate, &args.d_y, &args.d_h},
                                      args.stream_outputs, columns * element_size(problem.dtype));
  const NormKernels<NormBackwardKernel>& kernels = norm_backward_kernels()[problem.dtype];
  const NormBackwardKernel kernel = problem.centred ? kernels.layer : kernels.rms;
  // Processes short runs of rows and adds their sums with compensation. The error then does not
  // grow with the number of rows.
  const auto add_rows = [&](int64_t first, int64_t last, const NormSums& own) {
    if ((!own.weight && !own.bias) || last - first <= kRunRows) {
      kernel(args, first, last, own, thread_scratch(bytes));
      return;
    }
    const AlignedFloats memory(4 *
                               padded);  // sums of a run, and rounding errors of the part's sums
    std::fill_n(memory.get(), 4 * padded, 0.0f);
    const NormSums run = {own.weight ? memory.get() : nullptr,
                          own.bias ? memory.get() + padded : nullptr};
    for (int64_t row = first; row < last; row += kRunRows) {
      std::fill_n(memory.get(), 2 * padded, 0.0f);
      kernel(args, row, std::min(row + kRunRows, last), run, thread_scratch(bytes));
      if (own.weight) {
        add_compensated(run.weight, padded, own.weight, memory.get() + 2 * padded);
      }
      if (own.bias) {
        add_compensated(run.bias, padded, own.bias, memory.get() + 3 * padded);
      }
    }
  };
  parallel_for(all_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const NormSums own = sums_from(part);
      for (float* sum : {own.weight, own.bias}) {
        if (sum) {
          std::fill_n(sum, padded, 0.0f);
        }
      }
      const int64_t first_of_group = part / parts * rows_per_group;
      const int64_t first = part % parts * rows_per_part;
      const int64_t last = std::min(first + rows_per_part, rows_per_group);
      add_rows(first_of_group + first, first_of_group + last, own);
    }
  });

  const NormVectorKernels& of_vectors = norm_vector_kernels().of[problem.dtype];
  const int64_t block = norm_vector_kernels().block, blocks = padded / block;
  const bool to_float32 = problem.vectors.are_float32;
  const int64_t vector_bytes = columns * (to_float32 ? 4 : element_size(problem.dtype));
  for (int64_t group = 0; group < problem.groups; ++group) {
    const NormSums own = sums_from(group * parts);
    const auto sum_up = [&](const float* from, void* to) {
      if (!from) {
        return;
      }
      void* const row = static_cast<char*>(to) + group * vector_bytes;
      const int64_t grain = ceil_div(rows_of_grain(block), std::max<int64_t>(1, parts));
      parallel_for(blocks, grain, [&](int64_t begin, int64_t end) {
        of_vectors.sum_parts(from, parts, padded, begin * block, std::min(end * block, columns),
                             to_float32, row);
      });
    };
    sum_up(own.weight, d_weight);
    sum_up(own.bias, d_bias);
  }
}

}  // namespace mlx_anvil

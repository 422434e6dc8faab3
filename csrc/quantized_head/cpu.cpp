#include "quantized_head/cpu.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "metal/quantized_head/candidate.h"
#include "quantized_head/simd/kernels.h"
#include "quantized_matmul/gemv_operand.h"

namespace mlx_anvil {

namespace {

// Rows of w per block of logits. With 8 rows of x, a block takes 8 KiB and fits in L1.
constexpr int64_t kBlockOutputs = 256;

// The best candidates of a row of x so far. Holds up to twice as many as are kept before it
// partitions them: that takes a few comparisons per candidate on average, whatever the number kept.
class Best {
 public:
  explicit Best(size_t kept) : kept_(kept) {}

  void offer(uint64_t candidate) {
    candidates_.push_back(candidate);
    if (candidates_.size() == 2 * kept_) {
      std::nth_element(candidates_.begin(), candidates_.begin() + kept_ - 1, candidates_.end(),
                       std::greater());
      candidates_.resize(kept_);
      bar_ = std::bit_cast<float>(value_bits_of(candidates_.back()));
    }
  }

  void offer_all(const Best& other) {
    for (uint64_t candidate : other.candidates_) {
      offer(candidate);
    }
  }

  // Logits at or below the bar cannot be among the best, if their indices follow those already
  // offered. NaN means that any logit may be.
  float bar() const { return bar_; }

  // Returns the best in order. At least as many as are kept must have been offered.
  std::vector<uint64_t> in_order() && {
    std::sort(candidates_.begin(), candidates_.end(), std::greater());
    candidates_.resize(kept_);
    return std::move(candidates_);
  }

 private:
  size_t kept_;
  std::vector<uint64_t> candidates_;
  float bar_ = std::numeric_limits<float>::quiet_NaN();
};

std::vector<GemvOperand> operands_of(const QuantizedHeadArgs& args) {
  std::vector<GemvOperand> operands;
  const int64_t row_bytes = args.matrix.columns * element_size(args.matrix.dtype);
  for (int64_t row = 0; row < args.rows; row += kQuantizedGemvRows) {
    operands.emplace_back(args.matrix, at(args.x, row * row_bytes),
                          std::min<int64_t>(kQuantizedGemvRows, args.rows - row));
  }
  return operands;
}

// Returns the best of rows [begin, end) of w for every row of x. Each row of w is read from memory
// once: all rows of x use a block while it is in cache.
std::vector<Best> best_of(const QuantizedHeadArgs& args,
                          const std::vector<GemvOperand>& operands,
                          int64_t begin,
                          int64_t end) {
  std::vector<Best> best(args.rows, Best(args.kept));
  int32_t positions[kBlockOutputs];
  for (int64_t first = begin; first < end; first += kBlockOutputs) {
    const int64_t count = std::min(kBlockOutputs, end - first);
    for (size_t i = 0; i < operands.size(); ++i) {
      const Floats logits = operands[i].multiply(args.matrix, first, count);
      const int64_t first_row = static_cast<int64_t>(i) * kQuantizedGemvRows;
      const int64_t rows = std::min<int64_t>(kQuantizedGemvRows, args.rows - first_row);
      for (int64_t m = 0; m < rows; ++m) {
        Best& row = best[first_row + m];
        float* const own = logits.get() + m * count;
        const int64_t found =
            quantized_head_kernels().above(args.matrix.dtype, own, count, row.bar(), positions);
        for (int64_t j = 0; j < found; ++j) {
          row.offer(candidate_of(std::bit_cast<uint32_t>(own[positions[j]]),
                                 static_cast<uint32_t>(first + positions[j])));
        }
      }
    }
  }
  return best;
}

}  // namespace

void quantized_head_cpu(const QuantizedHeadArgs& args) {
  const std::vector<GemvOperand> operands = operands_of(args);
  std::vector<Best> best(args.rows, Best(args.kept));
  std::mutex mutex;
  parallel_for(args.matrix.outputs, gemv_grain(args.matrix), [&](int64_t begin, int64_t end) {
    const std::vector<Best> own = best_of(args, operands, begin, end);
    // The merge order does not matter: candidates are totally ordered.
    const std::lock_guard lock(mutex);
    for (int64_t row = 0; row < args.rows; ++row) {
      best[row].offer_all(own[row]);
    }
  });
  std::vector<float> values(args.kept);
  for (int64_t row = 0; row < args.rows; ++row) {
    const std::vector<uint64_t> candidates = std::move(best[row]).in_order();
    for (int64_t i = 0; i < args.kept; ++i) {
      args.indices[row * args.kept + i] = index_of(candidates[i]);
      values[i] = std::bit_cast<float>(value_bits_of(candidates[i]));
    }
    quantized_cpu_kernels().store_dense(
        args.matrix.dtype, values.data(), args.kept,
        at(args.values, row * args.kept * element_size(args.matrix.dtype)));
  }
}

}  // namespace mlx_anvil

#include "common/sum_rows.h"

#include <algorithm>
#include <vector>

#include "common/integers.h"
#include "common/parallel.h"
#include "common/sum_kernels.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kMostLanes = 16;
constexpr int64_t kChunk = 1024;  // columns summed at once, in the L1 cache
constexpr int64_t kNarrow = 128;  // fewer columns are combined with those of the next rows
constexpr int64_t kRun = 16;      // rows read side by side
// Minimum elements per part. The parts' sums are added at the end.
constexpr int64_t kPartElements = 131072;
constexpr int64_t kMostParts = 64;
constexpr int64_t kSumGrain = 32768;  // minimum elements per thread

// Uses several accumulators to hide the latency of the addition.
double sum_of(const float* x, int64_t count) {
  constexpr int kSums = 8;
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int s = 0; s < kSums; ++s) {
      sums[s] += x[i + s];
    }
  }
  for (; i < count; ++i) {
    sums[i % kSums] += x[i];
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// Clears `count` floats, rounded up to whole vectors.
void clear(float* numbers, int64_t count) {
  std::fill_n(numbers, round_up(count, kMostLanes), 0.0f);
}

// [outer, rows] -> [outer] for few rows; processes many `outer` at once.
void sum_short(const RowSum& sum) {
  const int64_t at_once = kChunk / sum.rows;
  const PerDtype<SumKernels>& kernels = sum_kernels();
  parallel_for(
      ceil_div(sum.outer, at_once), ceil_div(kSumGrain, kChunk), [&](int64_t begin, int64_t end) {
        alignas(64) float numbers[kChunk], lost[kChunk], totals[kChunk];
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t first = unit * at_once, count = std::min(at_once, sum.outer - first);
          clear(numbers, count * sum.rows);
          clear(lost, count * sum.rows);
          kernels[sum.in_dtype].add_rows(
              static_cast<const char*>(sum.in) + first * sum.rows * element_size(sum.in_dtype), 1,
              0, count * sum.rows, numbers, lost);
          for (int64_t i = 0; i < count; ++i) {
            totals[i] = static_cast<float>(sum_of(numbers + i * sum.rows, sum.rows));
          }
          kernels[sum.out_dtype].store(
              totals, count, static_cast<char*>(sum.out) + first * element_size(sum.out_dtype));
        }
      });
}

// Treats the rows as `full_` wide rows of `folded_` rows each, plus a partial wide row at the end.
class Summation {
 public:
  explicit Summation(const RowSum& sum)
      : sum_(sum),
        folded_(sum.inner < kNarrow
                    ? std::clamp<int64_t>(kNarrow / sum.inner, 1, std::max<int64_t>(1, sum.rows))
                    : 1),
        width_(folded_ * sum.inner),
        full_(sum.rows / folded_),
        rest_(sum.rows % folded_ * sum.inner),
        chunks_(ceil_div(width_, kChunk)),
        parts_(
            std::clamp<int64_t>(full_ * std::min(width_, kChunk) / kPartElements, 1, kMostParts)) {
    if (parts_ > 1) {
      partial_.resize(sum.outer * parts_ * width_);
    }
  }

  void run() {
    const int64_t elements = ceil_div(full_, parts_) * std::min(width_, kChunk);
    const int64_t grain = ceil_div(kSumGrain, std::max<int64_t>(1, elements));
    parallel_for(sum_.outer * chunks_ * parts_, grain, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        add_part(unit / parts_ / chunks_, unit / parts_ % chunks_ * kChunk, unit % parts_);
      }
    });
    if (parts_ > 1) {
      for (int64_t outer = 0; outer < sum_.outer; ++outer) {
        for (int64_t column = 0; column < width_; column += kChunk) {
          finish(outer, column, partial(outer, 0) + column, parts_, width_);
        }
      }
    }
  }

 private:
  float* partial(int64_t outer, int64_t part) {
    return partial_.data() + (outer * parts_ + part) * width_;
  }

  int64_t chunk_width(int64_t column) const { return std::min(kChunk, width_ - column); }

  void add_part(int64_t outer, int64_t column, int64_t part) {
    alignas(64) float sums[kChunk], lost[kChunk];
    const int64_t size = element_size(sum_.in_dtype), columns = chunk_width(column);
    clear(sums, columns);
    clear(lost, columns);
    const auto add_rows = sum_kernels()[sum_.in_dtype].add_rows;
    const auto* const first =
        static_cast<const char*>(sum_.in) + outer * sum_.rows * sum_.inner * size;
    const int64_t end = full_ * (part + 1) / parts_;
    for (int64_t row = full_ * part / parts_; row < end; row += kRun) {
      add_rows(first + (row * width_ + column) * size, std::min(kRun, end - row), width_, columns,
               sums, lost);
    }
    if (part == parts_ - 1 && rest_ > 0) {  // rest_ > 0 implies narrow rows, and thus one chunk
      add_rows(first + full_ * width_ * size, 1, 0, rest_, sums, lost);
    }
    if (parts_ > 1) {
      std::copy_n(sums, columns, partial(outer, part) + column);
    } else {
      finish(outer, column, sums, 1, 0);
    }
  }

  // Adds the parts, `step` floats apart, and the rows within each wide row.
  void finish(int64_t outer, int64_t column, const float* parts, int64_t count, int64_t step) {
    alignas(64) float totals[kChunk];
    const int64_t columns = folded_ > 1 ? sum_.inner : chunk_width(column);
    for (int64_t i = 0; i < columns; ++i) {
      double total = 0;
      for (int64_t part = 0; part < count; ++part) {
        const float* const of_part = parts + part * step;
        if (sum_.inner == 1) {
          total += sum_of(of_part, width_);
        } else {
          for (int64_t row = 0; row < folded_; ++row) {
            total += of_part[row * sum_.inner + i];
          }
        }
      }
      totals[i] = static_cast<float>(total);
    }
    void* const to =
        static_cast<char*>(sum_.out) + (outer * sum_.inner + column) * element_size(sum_.out_dtype);
    sum_kernels()[sum_.out_dtype].store(totals, columns, to);
  }

  const RowSum& sum_;
  const int64_t folded_, width_, full_, rest_, chunks_, parts_;
  std::vector<float> partial_;
};

}  // namespace

void add_compensated(const float* x, int64_t count, float* sums, float* lost) {
  sum_kernels().float32.add_rows(x, 1, 0, count, sums, lost);
}

void sum_rows(const RowSum& sum) {
  if (sum.outer * sum.inner == 0) {
    return;
  }
  if (sum.inner == 1 && sum.rows > 0 && sum.rows <= kNarrow) {
    sum_short(sum);
  } else {
    Summation(sum).run();
  }
}

}  // namespace mlx_anvil

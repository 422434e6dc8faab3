// CPU driver of rope: work items, tables and threads.
#include "rope/cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/integers.h"
#include "common/parallel.h"
#include "common/thread_scratch.h"
#include "rope/simd/kernels.h"

namespace mlx_anvil {

namespace {

// Floats in a table of cosines and sines. The table fits in L2: longer runs of rows gain more than
// L1 would.
constexpr int64_t kTableFloats = 16384;
// Heads that a kernel rotates together. More would be too many concurrent memory streams.
constexpr int64_t kHeads = 4;
// Minimum elements per thread.
constexpr int64_t kGrain = 32768;

// Puts the even elements of each block first, then the odd ones.
template <class T>
void put_even_first(std::vector<T>& numbers, int64_t block) {
  const std::vector<T> in_order = numbers;
  const int64_t half = block / 2;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto j = static_cast<int64_t>(i);
    numbers[i] = in_order[j / block * block + j % half * 2 + j % block / half];
  }
}

// Frequencies, padded to whole blocks, in the kernels' order.
struct PaddedFrequencies {
  std::vector<uint64_t> turns;
  std::vector<float> defects;

  PaddedFrequencies(const RopeArgs& args, int64_t padded) : defects(padded, 0.0f) {
    if (args.freqs == nullptr) {
      turns = rope_turns(args.frequencies, args.pairs);
    } else {
      const double over_freqs = rope_turns_over_freqs(args.frequencies);
      for (int64_t j = 0; j < args.pairs; ++j) {
        const double of_one = over_freqs / args.freqs[j];
        turns.push_back(rope_fixed_point(of_one));
        defects[j] = std::isfinite(of_one) ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      }
    }
    turns.resize(padded, 0);
    if (args.dtype == mx::bfloat16 && !args.traditional) {
      put_even_first(turns, rope_kernels().block);
      put_even_first(defects, rope_kernels().block);
    }
  }
};

// A run of positions of a few heads of one tensor. Items that share a table are adjacent: all
// heads, and all batch rows if they share an offset.
struct Item {
  int64_t first, batch, group;
};

class RopeCall {
 public:
  explicit RopeCall(const RopeArgs& args)
      : args_(args),
        padded_(ceil_div(args.pairs, kernels().block) * kernels().block),
        frequencies_(args, padded_),
        positions_(std::max<int64_t>(1, std::min(kTableFloats / (2 * padded_), args.length))) {
    for (int i = 0; i < args.count; ++i) {
      groups_ += groups_of(args.tensors[i]);
    }
  }

  void run() const {
    const int64_t items = ceil_div(args_.length, positions_) * args_.batch * groups_;
    const int64_t grain = ceil_div(kGrain, positions_ * kHeads * args_.head_dim);
    const auto table_bytes = static_cast<int64_t>(sizeof(float)) * positions_ * 2 * padded_;
    parallel_for(items, grain, [&](int64_t begin, int64_t end) {
      auto* const table = static_cast<float*>(thread_scratch(table_bytes));
      Item known = {-1, -1, -1};
      for (int64_t i = begin; i < end; ++i) {
        const Item item = {i / groups_ / args_.batch * positions_, i / groups_ % args_.batch,
                           i % groups_};
        if (item.first != known.first || offset(item.batch) != offset(known.batch)) {
          kernels().angles({frequencies_.turns.data(), frequencies_.defects.data(), padded_,
                            position(item), count(item), args_.inverse},
                           table);
          known = item;
        }
        rotate(item, table);
      }
      if (args_.stream) {
        kernels().finish_streaming();
      }
    });
  }

 private:
  static const RopeKernels& kernels() { return rope_kernels(); }

  static int64_t groups_of(const RopeTensor& tensor) { return ceil_div(tensor.heads, kHeads); }

  int64_t offset(int64_t batch) const {
    const int64_t at = args_.offset_per_batch ? std::max<int64_t>(0, batch) : 0;
    return args_.offset_is_wide ? static_cast<const int64_t*>(args_.offset)[at]
                                : static_cast<const int32_t*>(args_.offset)[at];
  }

  // The first position of an item, modulo 2^64.
  uint64_t position(const Item& item) const {
    return static_cast<uint64_t>(offset(item.batch)) + static_cast<uint64_t>(item.first);
  }

  int64_t count(const Item& item) const { return std::min(positions_, args_.length - item.first); }

  void rotate(const Item& item, const float* table) const {
    const int64_t groups_of_first = groups_of(args_.tensors[0]);
    const bool of_first = item.group < groups_of_first;
    const RopeTensor& tensor = args_.tensors[of_first ? 0 : 1];
    const int64_t head = (of_first ? item.group : item.group - groups_of_first) * kHeads;
    const auto size = static_cast<int64_t>(mx::size_of(args_.dtype));
    const int64_t in =
        item.batch * tensor.strides[0] + head * tensor.strides[1] + item.first * tensor.strides[2];
    const int64_t out_head_step = args_.length * args_.head_dim;
    const int64_t out =
        (item.batch * tensor.heads + head) * out_head_step + item.first * args_.head_dim;
    const RopeRows rows = {static_cast<const char*>(tensor.in) + in * size,
                           static_cast<char*>(tensor.out) + out * size,
                           count(item),
                           std::min(kHeads, tensor.heads - head),
                           tensor.strides[1],
                           tensor.strides[2],
                           tensor.strides[3],
                           out_head_step,
                           args_.head_dim,
                           args_.pairs,
                           args_.traditional,
                           args_.stream,
                           table,
                           padded_};
    args_.dtype == mx::float32   ? kernels().rotate_float32(rows)
    : args_.dtype == mx::float16 ? kernels().rotate_float16(rows)
                                 : kernels().rotate_bfloat16(rows);
  }

  const RopeArgs& args_;
  const int64_t padded_;
  const PaddedFrequencies frequencies_;
  const int64_t positions_;  // per item
  int64_t groups_ = 0;       // of heads, over all tensors
};

}  // namespace

void rope_cpu(const RopeArgs& args) {
  RopeCall(args).run();
}

}  // namespace mlx_anvil

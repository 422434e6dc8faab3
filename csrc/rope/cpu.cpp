// CPU driver of rope: work items, tables and threads.
#include "rope/cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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
// Bytes of a cache that one thread copies at a time.
constexpr int64_t kCopied = 1 << 18;

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

template <class Bits>
void copy_rows(const RopeRows& rows) {
  for (int64_t head = 0; head < rows.heads; ++head) {
    for (int64_t l = 0; l < rows.count; ++l) {
      const Bits* in =
          static_cast<const Bits*>(rows.in) + head * rows.head_step + l * rows.row_step;
      Bits* out = static_cast<Bits*>(rows.out) + head * rows.out_head_step + l * rows.head_dim;
      for (int64_t i = 0; i < rows.head_dim; ++i) {
        out[i] = in[i * rows.column_step];
      }
    }
  }
}

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
        frequencies_(
            {static_cast<int>(args.pairs), args.traditional, args.inverse, args.frequencies},
            args.freqs,
            args.dtype),
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
    const RopeTensor* tensor = args_.tensors;
    int64_t group = item.group;
    for (; group >= groups_of(*tensor); ++tensor) {
      group -= groups_of(*tensor);
    }
    const int64_t head = group * kHeads;
    const auto size = static_cast<int64_t>(mx::size_of(args_.dtype));
    const Run run = run_of(item, *tensor);
    const int64_t in = item.batch * tensor->strides[0] + head * tensor->strides[1] +
                       (item.first + run.skipped) * tensor->strides[2];
    const int64_t out_head_step = tensor->out_rows * args_.head_dim;
    const int64_t out =
        (item.batch * tensor->heads + head) * out_head_step + run.out_row * args_.head_dim;
    const RopeRows rows = {static_cast<const char*>(tensor->in) + in * size,
                           static_cast<char*>(tensor->out) + out * size,
                           run.count,
                           std::min(kHeads, tensor->heads - head),
                           tensor->strides[1],
                           tensor->strides[2],
                           tensor->strides[3],
                           out_head_step,
                           args_.head_dim,
                           args_.pairs,
                           args_.traditional,
                           args_.stream,
                           table + run.skipped * 2 * padded_,
                           padded_};
    if (!tensor->rotates) {
      args_.dtype == mx::float32 ? copy_rows<uint32_t>(rows) : copy_rows<uint16_t>(rows);
    } else {
      args_.dtype == mx::float32   ? kernels().rotate_float32(rows)
      : args_.dtype == mx::float16 ? kernels().rotate_float16(rows)
                                   : kernels().rotate_bfloat16(rows);
    }
  }

  // The rows of an item that the output has.
  struct Run {
    int64_t skipped, count, out_row;
  };
  Run run_of(const Item& item, const RopeTensor& tensor) const {
    if (!tensor.at_offset) {
      return {0, count(item), item.first};
    }
    const int64_t at = offset(item.batch);
    if (at >= tensor.out_rows || at <= -args_.length) {
      return {0, 0, 0};
    }
    const int64_t row = at + item.first;
    const int64_t skipped = std::clamp<int64_t>(-row, 0, count(item));
    const int64_t end = std::min(count(item), tensor.out_rows - row);
    return {skipped, std::max<int64_t>(end - skipped, 0), std::max<int64_t>(row, 0)};
  }

  const RopeArgs& args_;
  const int64_t padded_;
  const PaddedFrequencies frequencies_;
  const int64_t positions_;  // per item
  int64_t groups_ = 0;       // of heads, over all tensors
};

}  // namespace

RopeArgs cpu_args(const RopeConfig& config, const RopePositions& positions, const mx::array& x) {
  RopeArgs args{};
  args.dtype = x.dtype();
  args.batch = x.shape(0);
  args.length = x.shape(2);
  args.head_dim = x.shape(3);
  args.pairs = config.pairs;
  args.offset = positions.offset.data<void>();
  args.offset_is_wide = positions.offset.dtype() == mx::int64;
  args.offset_per_batch = positions.offset.size() > 1;
  args.freqs = positions.freqs ? positions.freqs->data<float>() : nullptr;
  args.frequencies = config.frequencies;
  args.traditional = config.traditional;
  args.inverse = config.inverse;
  return args;
}

PaddedFrequencies::PaddedFrequencies(const RopeConfig& config,
                                     const float* freqs,
                                     mx::Dtype dtype) {
  const int64_t block = rope_kernels().block;
  const int64_t padded = ceil_div(int64_t{config.pairs}, block) * block;
  defects.resize(padded, 0.0f);
  if (freqs == nullptr) {
    turns = rope_turns(config.frequencies, config.pairs);
  } else {
    const double over_freqs = rope_turns_over_freqs(config.frequencies);
    for (int64_t j = 0; j < config.pairs; ++j) {
      const double of_one = over_freqs / freqs[j];
      turns.push_back(rope_fixed_point(of_one));
      defects[j] = std::isfinite(of_one) ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    }
  }
  turns.resize(padded, 0);
  if (dtype == mx::bfloat16 && !config.traditional) {
    put_even_first(turns, block);
    put_even_first(defects, block);
  }
}

void copy_on_cpu(const RopeCopy& copy) {
  parallel_for(ceil_div(copy.bytes, kCopied), 1, [&](int64_t begin, int64_t end) {
    const int64_t from = begin * kCopied, to = std::min(copy.bytes, end * kCopied);
    std::memcpy(static_cast<char*>(copy.to) + from, static_cast<const char*>(copy.from) + from,
                static_cast<size_t>(to - from));
  });
}

void rope_cpu(const RopeArgs& args) {
  for (const RopeCopy& copy : args.copies) {
    copy_on_cpu(copy);
  }
  RopeCall(args).run();
}

}  // namespace mlx_anvil

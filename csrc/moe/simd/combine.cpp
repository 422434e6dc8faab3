// The weighted sum of moe_combine, with the formula of metal/moe/combine.metal.
//
//   for each piece of a token's columns: for each block:
//     sum = weight * row of each of the token's pairs, in order
//     out = sum + residual + sigmoid(gate) * shared
#include "common/simd/prefetch.h"
#include "moe/simd/kernels.h"
#include "moe/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// The pairs of one token, and the rows of the next one if they are prefetched.
template <class T>
struct Slots {
  const T** rows;
  const T** next;
  float* weights;
  bool has_next = false;

  Slots(void* scratch, int64_t chosen)
      : rows(static_cast<const T**>(scratch)),
        next(rows + chosen),
        weights(reinterpret_cast<float*>(next + chosen)) {}

  static int64_t bytes(int64_t chosen) { return chosen * int64_t{2 * sizeof(T*) + sizeof(float)}; }

  void read(const MoeCombineArgs& args, int64_t token) {
    const MoeSizes& sizes = args.sizes;
    const int64_t first = token * sizes.chosen;
    find_rows(args, token, rows);
    for (int64_t j = 0; j < sizes.chosen; ++j) {
      weights[j] = args.weights.data ? factor_at<T>(args.weights, first + j) : 1.0f;
    }
    has_next = args.stream_outputs && token + 1 < sizes.batches * sizes.tokens;
    if (has_next) {
      find_rows(args, token + 1, next);
    }
  }

 private:
  static void find_rows(const MoeCombineArgs& args, int64_t token, const T** to) {
    const MoeSizes& sizes = args.sizes;
    const int64_t pairs = sizes.pairs(), first = token / sizes.tokens * pairs;
    for (int64_t j = 0; j < sizes.chosen; ++j) {
      const int64_t place = first + moe_place(args.inverse[token * sizes.chosen + j], pairs);
      to[j] = static_cast<const T*>(args.y) + place * sizes.columns;
    }
  }
};

template <class T>
class TokenSum {
 public:
  TokenSum(const MoeCombineArgs& args, const Slots<T>& slots, int64_t token)
      : args_(args), slots_(slots), first_(token * args.sizes.columns) {
    if (args.gate.data) {
      share_ = share_of(factor_at<T>(args.gate, token)).value;
    }
  }

  template <bool kStream>
  void run(int64_t begin, int64_t end) const {
    int64_t i = begin;
    for (; i + 2 * kBlock <= end; i += 2 * kBlock) {
      blocks<kStream, 2>(i, kBlock);
    }
    for (; i < end; i += kBlock) {
      blocks<kStream, 1>(i, end - i);
    }
  }

 private:
  template <bool kStream, int kBlocks>
  void blocks(int64_t at, int64_t count) const {
    Block sums[kBlocks] = {};
    const auto add = [&](const T* row, float factor) {
      for (int i = 0; i < kBlocks; ++i) {
        const Block x = load_part(row + at + i * kBlock, count);
        sums[i].first += x.first * factor;
        sums[i].second += x.second * factor;
      }
    };
    for (int64_t j = 0; j < args_.sizes.chosen; ++j) {
      add(slots_.rows[j], slots_.weights[j]);
    }
    if (slots_.has_next && count >= kBlock) {
      prefetch<kBlocks>(at);
    }
    if (args_.residual) {
      add(static_cast<const T*>(args_.residual) + first_, 1.0f);
    }
    if (args_.shared) {
      add(static_cast<const T*>(args_.shared) + first_, share_);
    }
    for (int i = 0; i < kBlocks; ++i) {
      store_part<kStream>(static_cast<T*>(args_.out) + first_ + at + i * kBlock, count, sums[i]);
    }
  }

  // The same columns of the next token. A token's rows are too many, and too short, for the
  // processor to prefetch them by itself.
  template <int kBlocks>
  void prefetch(int64_t at) const {
    for (int64_t j = 0; j < args_.sizes.chosen; ++j) {
      for (int i = 0; i < kBlocks; ++i) {
        prefetch_block(slots_.next[j] + at + i * kBlock);
      }
    }
  }

  const MoeCombineArgs& args_;
  const Slots<T>& slots_;
  const int64_t first_;
  float share_ = 1.0f;
};

template <class T>
void combine(const MoeCombineArgs& args, int64_t begin, int64_t end, void* scratch) {
  const int64_t columns = args.sizes.columns;
  const int64_t pieces = (columns + kMoePieceColumns - 1) / kMoePieceColumns;
  Slots<T> slots(scratch, args.sizes.chosen);
  const bool streams =
      args.stream_outputs && rows_are_aligned(static_cast<const T*>(args.out), columns);
  int64_t read = -1;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t token = piece / pieces, from = piece % pieces * kMoePieceColumns;
    const int64_t to = from + kMoePieceColumns < columns ? from + kMoePieceColumns : columns;
    if (token != read) {
      slots.read(args, token);
      read = token;
    }
    const TokenSum<T> sum(args, slots, token);
    if (streams) {
      sum.template run<true>(from, to);
    } else {
      sum.template run<false>(from, to);
    }
  }
  finish_streaming();
}

}  // namespace

constinit const MoeCombineKernels moe_combine_kernels_table = {
    .of = {.float32 = combine<float>, .float16 = combine<f16>, .bfloat16 = combine<bf16>},
    .scratch_bytes = Slots<float>::bytes,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

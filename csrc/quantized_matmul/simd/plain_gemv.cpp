// Plain GEMV: out[m, k] = sum over n of x[m, n] W[n, k] for up to 8 rows m, the gradient in x of
// gemv.cpp. Each word of w is read once for all rows. The sums of a strip of columns stay in L1
// while rows of w stream past, several at a time, so that they are loaded and stored once for all
// of these.
//
//   for each kTaken rows of w: for each block of the strip:
//     unpack the codes; look up scales and biases; prefetch later rows
//     for each code: value = code * scale + bias; out[m] += x[m] * value
#include "quantized_matmul/simd/entries.h"
#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

constexpr int kTaken = 4;  // rows of w per pass

// Prefetch distance in rows. Only a strip of each row is read, so the hardware prefetcher cannot
// predict the next row.
constexpr int64_t kAheadRows = 16;

// kOneRow: x has one row, else an even number of them.
template <class Format, bool kOneRow>
class PlainGemv {
 public:
  explicit PlainGemv(const QuantizedPlainGemvArgs& args)
      : args_(args),
        x_rows_(kOneRow ? 1 : args.x_rows),
        units_(args.matrix.columns / BlockUnits::kValues) {
    const int64_t units_per_group = args.matrix.format.group / BlockUnits::kValues;
    for (int lane = 0; lane < kLanes; ++lane) {
      group_of_lane_[lane] = static_cast<uint32_t>(lane / units_per_group);
    }
    group_shift_ = __builtin_ctz(static_cast<unsigned>(units_per_group));
  }

  void run() {
    for (int64_t i = 0; i < x_rows_ * args_.blocks * kBlock; i += kLanes) {
      store_lanes(args_.out + i, f32v{});
    }
    int64_t n = 0;
    for (; n + kTaken <= args_.count; n += kTaken) {
      add_rows<kTaken>(n);
    }
    for (; n < args_.count; ++n) {
      add_rows<1>(n);
    }
  }

 private:
  using BlockUnits = Units<Format::kBits>;
  static constexpr int64_t kBlock = BlockUnits::kValues * kLanes;
  static constexpr int64_t kBlockWords = BlockUnits::kWords * kLanes;

  void prefetch_scales(const void* numbers, int64_t first) const {
    const int64_t size = scale_size(args_.matrix.format, args_.matrix.weights);
    __builtin_prefetch(static_cast<const char*>(numbers) + first * size, 0, 2);
  }

  int64_t group_of_block(int64_t block) const { return block * kLanes >> group_shift_; }

  // Adds rows n to n + kCount of w, times their elements of x.
  template <int kCount>
  void add_rows(int64_t n) {
    const int64_t row_words = units_ * BlockUnits::kWords;
    const uint32_t* const w = args_.matrix.weights.w + (args_.first + n) * row_words;
    const float* const x = args_.x + n * x_rows_;
    // The strip's groups fit in one vector. Columns past the row's end are undefined; their results
    // stay in separate lanes.
    const int64_t groups = args_.matrix.columns / args_.matrix.format.group;
    const int64_t first_group = group_of_block(args_.first_block);
    f32v scales[kCount], biases[kCount];
    for (int r = 0; r < kCount; ++r) {
      const int64_t first = (args_.first + n + r) * groups + first_group;
      const int64_t total = args_.matrix.outputs * groups;
      prefetch_scales(args_.matrix.weights.scales, first + kAheadRows * groups);
      scales[r] = load_scales(args_.matrix, args_.matrix.weights.scales, first, total);
      if constexpr (Format::kHasBiases) {
        prefetch_scales(args_.matrix.weights.biases, first + kAheadRows * groups);
        biases[r] = load_scales(args_.matrix, args_.matrix.weights.biases, first, total);
      }
    }
    for (int64_t b = 0; b < args_.blocks; ++b) {
      const int64_t block = args_.first_block + b;
      BlockUnits packed[kCount];
      const u32v group =
          group_of_lane_ + static_cast<uint32_t>(group_of_block(block) - first_group);
      f32v scale[kCount], bias[kCount];
      for (int r = 0; r < kCount; ++r) {
        const uint32_t* const from = w + r * row_words + block * kBlockWords;
        packed[r].load(from, units_ - block * kLanes);
        for (int64_t line = 0; line < BlockUnits::kWords; ++line) {
          __builtin_prefetch(from + kAheadRows * row_words + line * kLanes, 0, 2);
        }
        scale[r] = lookup(scales[r], group);
        if constexpr (Format::kHasBiases) {
          bias[r] = lookup(biases[r], group);
        }
      }
      float* const out = args_.out + b * kBlock;
      if constexpr (kOneRow) {
        add_block_once<kCount>(packed, scale, bias, x, out);
      } else {
        add_block<kCount>(packed, scale, bias, x, out);
      }
    }
  }

  template <int kCount>
  void add_block(const BlockUnits (&packed)[kCount],
                 const f32v (&scale)[kCount],
                 const f32v (&bias)[kCount],
                 const float* x,
                 float* out) {
    const int64_t step = args_.blocks * kBlock;
    unroll<BlockUnits::kValues>([&](auto i) {
      f32v value[kCount];
      for (int r = 0; r < kCount; ++r) {
        value[r] = Format::value(packed[r].template shifted<i.value>()) * scale[r];
        if constexpr (Format::kHasBiases) {
          value[r] += bias[r];
        }
      }
      float* to = out + i.value * kLanes;
      const float* of_rows = x;
      for (int64_t m = 0; m < x_rows_; m += 2, to += 2 * step, of_rows += 2) {
        f32v sum[2] = {load_lanes(to), load_lanes(to + step)};
        for (int r = 0; r < kCount; ++r) {
          sum[0] += value[r] * splat(of_rows[r * x_rows_]);
          sum[1] += value[r] * splat(of_rows[r * x_rows_ + 1]);
        }
        store_lanes(to, sum[0]);
        store_lanes(to + step, sum[1]);
      }
    });
  }

  // With one row of x, its elements are folded into scales and biases. That saves one
  // multiplication per code.
  template <int kCount>
  void add_block_once(const BlockUnits (&packed)[kCount],
                      f32v (&scale)[kCount],
                      const f32v (&bias)[kCount],
                      const float* x,
                      float* out) {
    f32v shift{};
    for (int r = 0; r < kCount; ++r) {
      scale[r] *= splat(x[r]);
      if constexpr (Format::kHasBiases) {
        shift += bias[r] * splat(x[r]);
      }
    }
    unroll<BlockUnits::kValues>([&](auto i) {
      float* const to = out + i.value * kLanes;
      f32v sum = load_lanes(to);
      if constexpr (Format::kHasBiases) {
        sum += shift;
      }
      for (int r = 0; r < kCount; ++r) {
        sum += Format::value(packed[r].template shifted<i.value>()) * scale[r];
      }
      store_lanes(to, sum);
    });
  }

  const QuantizedPlainGemvArgs& args_;
  const int64_t x_rows_, units_;
  u32v group_of_lane_;
  int group_shift_;
};

}  // namespace

void quantized_plain_gemv(const QuantizedPlainGemvArgs& args) {
  with_format(args.matrix.format, [&](auto format) {
    using Format = decltype(format);
    args.x_rows == 1 ? PlainGemv<Format, true>(args).run() : PlainGemv<Format, false>(args).run();
  });
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

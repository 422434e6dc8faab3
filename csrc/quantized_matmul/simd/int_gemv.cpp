// Integer GEMV: the products of gemv.cpp on machines with VNNI:
//   x ~= step * X,  X = X0 + 256 X1 (+ 65536 X2), each X_i a signed byte, one step per unit
//   sum of code * x ~= step * (sum of code * X), which is exact
// x has three bytes for float32, else two, or as few as the format allows (activation_bits).
// Relative to the largest element of its unit, an element is off by at most 2^-23, 2^-15 or, in one
// byte, 2^-8. One instruction sums four products, so that unpacking and
// multiplying keep up with memory. As in gemv.cpp, a row takes the same steps for every row count;
// one row alone takes them in a loop of its own (int_gemv_one.h).
//
//   for each strip of rows of w, range of blocks, kOutputs rows of the strip, block of the range:
//     unpack the codes to bytes; prefetch; look up the scales
//     for each kTogether rows of x:
//       sums = offsets + sum of codes * X for each piece          (vpdpbusd)
//       totals += sums * step * scale
//   totals += biases * (sum of x); out = lane sums of totals
#include "quantized_matmul/simd/entries.h"
#if defined(__AVX512VNNI__)
#include "quantized_matmul/simd/int_gemv_one.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

// Rows of w per strip.
constexpr int kIntGemvStrip = 8;

// Two rows of x, or kRows = 0: 4 or 8 of them, which share their code.
template <class Format, int kPieces, int kRows>
class IntGemv {
 public:
  explicit IntGemv(const QuantizedGemvArgs& args)
      : args_(args),
        layout_(args.matrix),
        scales_(args.matrix, BlockUnits::kValues, args.scratch, BlockUnits::unit_of_lane),
        units_(layout_.columns / BlockUnits::kValues),
        x_rows_(kRows > 0 ? kRows : args.x_rows),
        in_strips_(x_rows_ * kPieces > 8),
        strip_(in_strips_ ? kIntGemvStrip : kOutputs),
        ahead_words_(in_strips_ ? strip_ * units_ * kWords : kAheadWords) {}

  void run() {
    for (int64_t n = 0; n < args_.count; n += strip_) {
      const int64_t rows = args_.count - n < strip_ ? args_.count - n : strip_;
      Totals totals[kMostRows * kPieces > 8 ? kIntGemvStrip / kOutputs : 1];
      for (int64_t r = 0; r < rows; ++r) {
        scales_.read(args_.first + n + r, r);
      }
      for (int64_t r = 0; r < rows; r += kOutputs) {
        for (int64_t m = 0; m < x_rows_; ++m) {
          for (int o = 0; o < kOutputs; ++o) {
            totals[r / kOutputs][m][o] = f32v{};
          }
        }
      }
      const int64_t step = in_strips_ ? kBlocksAtOnce : layout_.blocks;
      for (int64_t block = 0; block < layout_.blocks; block += step) {
        for (int64_t r = 0; r < rows; r += kOutputs) {
          multiply(n, r, block, step, totals[r / kOutputs]);
        }
      }
      for (int64_t r = 0; r < rows; r += kOutputs) {
        if constexpr (kRows > 0) {
          finish<kRows>(n, r, totals[r / kOutputs]);
        } else {
          x_rows_ == 4 ? finish<4>(n, r, totals[r / kOutputs])
                       : finish<8>(n, r, totals[r / kOutputs]);
        }
      }
    }
  }

 private:
  using BlockUnits = typename Bytes<Format>::BlockUnits;
  static constexpr int kVectors = Bytes<Format>::kVectors, kWords = BlockUnits::kWords;
  static constexpr int kOutputs = kIntGemvOutputs;  // rows of w together
  static constexpr int kTogether = 2;               // rows of x together
  static constexpr int kMostRows = kRows > 0 ? kRows : 8;
  using Totals = f32v[kMostRows][kOutputs];
  static constexpr bool kShort = kVectors == 1;  // blocks of 8-bit codes
  // Many rows of x exceed L1, and L2 is no faster than the multiplication. So a few blocks of x are
  // reused for a strip of rows of w.
  static constexpr int64_t kBlocksAtOnce =
      (1024 + kLanes * Bytes<Format>::kValues - 1) / (kLanes * Bytes<Format>::kValues);

  // Multiplies rows r to r + kOutputs of the strip at row n, for `count` blocks from `block` on.
  void multiply(int64_t n, int64_t r, int64_t block, int64_t count, Totals& totals) {
    const uint32_t* w[kOutputs];  // of the block
    for (int o = 0; o < kOutputs; ++o) {
      // Past the last row of w, repeat it.
      const int64_t row = n + r + o < args_.count ? n + r + o : args_.count - 1;
      w[o] = args_.matrix.weights.w + ((args_.first + row) * units_ + block * kLanes) * kWords;
    }
    const int64_t end = layout_.blocks - block < count ? layout_.blocks : block + count;
    const int64_t whole = units_ / kLanes;
    if constexpr (kShort && kRows > 0) {
      // Even the test for the last block would take time.
      for (; block < whole && block < end; ++block) {
        prefetch(w);
        add_block(w, r, block, totals);
        advance(w);
      }
    }
    uint32_t padded[kOutputs][kWords * kLanes];
    for (; block < end; ++block) {
      prefetch(w);
      if (block == whole) [[unlikely]] {
        // A copy, so that one loop serves whole blocks and this one, the row's last.
        unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
          copy_with_zeros<kWords>(w[o.value], (units_ - block * kLanes) * kWords, padded[o.value]);
          w[o.value] = padded[o.value];
        });
      }
      if constexpr ((kRows == 0 && !kShort) || (kRows == 2 && kVectors == 8)) {
        add_block_of_rows(w, r, block, totals);
      } else {
        add_block(w, r, block, totals);
      }
      advance(w);
    }
  }

  MLX_ANVIL_UNROLLED void prefetch(const uint32_t* const (&w)[kOutputs]) const {
    unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
      for (int line = 0; line < kWords; ++line) {
        // The line of the last word: that of the first may belong to the previous block.
        __builtin_prefetch(w[o.value] + ahead_words_ + (line + 1) * kLanes - 1, 0, 2);
      }
    });
  }
  MLX_ANVIL_UNROLLED static void advance(const uint32_t* (&w)[kOutputs]) {
    for (int o = 0; o < kOutputs; ++o) {
      w[o] += kLanes * kWords;
    }
  }

  // A call per block, which is cheap beside several rows of x, leaves their loop all registers.
  [[gnu::noinline]] void add_block_of_rows(const uint32_t* (&w)[kOutputs],
                                           int64_t r,
                                           int64_t block,
                                           Totals& totals) {
    add_block(w, r, block, totals);
  }

  MLX_ANVIL_UNROLLED void add_block(const uint32_t* (&w)[kOutputs],
                                    int64_t r,
                                    int64_t block,
                                    Totals& totals) {
    u32v codes[kOutputs][kVectors];
    f32v scale[kOutputs];
    unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
      BlockUnits packed;
      packed.load_whole(w[o.value]);
      unroll<kVectors>([&](auto v) {
        codes[o.value][v.value] = Bytes<Format>::template vector<v.value>(packed);
      });
      scale[o.value] = scales_.scale(block, r + o.value);
    });
    const char* row = reinterpret_cast<const char*>(args_.x);
    const int64_t row_bytes = layout_.bytes();
    f32v(*total)[kOutputs] = totals;
    int rows = kRows > 0 ? kRows : static_cast<int>(x_rows_);
    if constexpr (kRows == 0) {
      // Hides the trip count: compilers would unroll this loop fully and run out of registers.
      asm("" : "+r"(rows), "+r"(total));
    }
    for (; rows > 0; rows -= kTogether, total += kTogether, row += kTogether * row_bytes) {
      f32v products[kTogether][kOutputs];
      block_products<Format, kPieces, kTogether, kOutputs>(
          [&](auto v, auto o) __attribute__((always_inline)) { return codes[o.value][v.value]; },
          row + block * layout_.block_columns * kPieces,
          row + layout_.offsets_at() + block * sizeof(i32v), row_bytes, products);
      unroll<kTogether>([&](auto m) __attribute__((always_inline)) {
        const f32v step = load_lanes(
            reinterpret_cast<const float*>(row + m.value * row_bytes + layout_.steps_at()) +
            block * kLanes);
        unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
          // Keep this order: a small scale times the step could be subnormal.
          total[m.value][o.value] += products[m.value][o.value] * step * scale[o.value];
        });
      });
    }
  }

  template <int kCount>
  void finish(int64_t n, int64_t r, const Totals& totals) {
    // Copied by an unrolled loop, so that they stay in registers.
    f32v sums[kCount * kOutputs];
    unroll<kCount * kOutputs>([&](auto i) __attribute__((always_inline)) {
      sums[i.value] = totals[i.value / kOutputs][i.value % kOutputs];
    });
    if constexpr (Format::kHasBiases) {
      const char* const x = reinterpret_cast<const char*>(args_.x) + layout_.sums_at();
      const int64_t row_bytes = layout_.bytes();
      for (int64_t g = 0; g < layout_.groups; g += kLanes) {
        f32v bias[kOutputs];
        for (int o = 0; o < kOutputs; ++o) {
          bias[o] = scales_.biases_from(g, r + o);
          if constexpr (Bytes<Format>::kOffset != 0) {
            bias[o] += scales_.scales_from(g, r + o) * static_cast<float>(Bytes<Format>::kOffset);
          }
        }
        unroll<kCount>([&](auto m) __attribute__((always_inline)) {
          const f32v of_x = load_lanes(reinterpret_cast<const float*>(x + m.value * row_bytes) + g);
          unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
            sums[m.value * kOutputs + o.value] += bias[o.value] * of_x;
          });
        });
      }
    }
    const f32v results = sums_of_lanes<kCount * kOutputs>(sums) * Format::kFactor;
    for (int o = 0; o < kOutputs && n + r + o < args_.count; ++o) {
      for (int m = 0; m < kCount; ++m) {
        args_.out[m * args_.count + n + r + o] = results[m * kOutputs + o];
      }
    }
  }

  const QuantizedGemvArgs& args_;
  const IntRowLayout layout_;
  RowScales scales_;
  const int64_t units_, x_rows_;
  const bool in_strips_;
  const int64_t strip_;        // rows of w
  const int64_t ahead_words_;  // with strips: to the same columns of the next strip
};

template <class Format, int kPieces>
void multiply_rows(const QuantizedGemvArgs& args) {
  switch (args.x_rows) {
    case 1:
      return IntGemvOfOne<Format, kPieces>(args).run();
    case 2:
      return IntGemv<Format, kPieces, 2>(args).run();
    default:
      return IntGemv<Format, kPieces, 0>(args).run();
  }
}

}  // namespace

int64_t quantized_int_row_bytes(const QuantizedMatrixView& matrix) {
  return matrix.format.kind == QuantizedKind::kMxfp8 ? 0 : IntRowLayout(matrix).bytes();
}

bool quantized_int_pack(const QuantizedMatrixView& matrix, const float* x, void* to) {
  bool finite = false;
  with_int_format(matrix.format, [&](auto format) {
    using Format = decltype(format);
    with_pieces(matrix, [&](auto pieces) {
      finite = pack_row<Format, pieces.value>(matrix, x, static_cast<char*>(to));
    });
  });
  return finite;
}

void quantized_int_gemv(const QuantizedGemvArgs& args) {
  with_int_format(args.matrix.format, [&](auto format) {
    using Format = decltype(format);
    with_pieces(args.matrix, [&](auto pieces) { multiply_rows<Format, pieces.value>(args); });
  });
}

int64_t quantized_int_gemv_scratch(const QuantizedMatrixView& matrix) {
  return kIntGemvStrip * RowScales::scratch(matrix);
}

// Those are in avx2_gemv.cpp and arm_gemv.cpp.
#elif !defined(MLX_ANVIL_AVX2_PRODUCTS) && !defined(__ARM_FEATURE_DOTPROD)

int64_t quantized_int_row_bytes(const QuantizedMatrixView&) {
  return 0;
}
bool quantized_int_pack(const QuantizedMatrixView&, const float*, void*) {
  return false;
}
void quantized_int_gemv(const QuantizedGemvArgs&) {}
int64_t quantized_int_gemv_scratch(const QuantizedMatrixView&) {
  return 0;
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

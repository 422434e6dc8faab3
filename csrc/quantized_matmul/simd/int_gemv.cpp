// Integer GEMV: the products of gemv.cpp on machines with VNNI:
//   x ~= step * X,  X = X0 + 256 X1 (+ 65536 X2), each X_i a signed byte, one step per unit
//   sum of code * x ~= step * (sum of code * X), which is exact
// x has three bytes for float32, else two: relative to the largest element of its unit, an element
// is off by at most 2^-23 or 2^-15. One instruction sums four products, so that unpacking and
// multiplying keep up with memory. As in gemv.cpp, a row takes the same steps for every row count.
//
//   for each strip of rows of w, range of blocks, kOutputs rows of the strip, block of the range:
//     unpack the codes to bytes; prefetch; look up the scales
//     for each kTogether rows of x:
//       sums = offsets + sum of codes * X for each piece          (vpdpbusd)
//       totals += sums * step * scale
//   totals += biases * (sum of x); out = lane sums of totals
#include "quantized_matmul/simd/entries.h"
#if defined(__AVX512VNNI__)
#include "quantized_matmul/simd/int_rows.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

// Rows of w that are multiplied together, and rows per strip.
constexpr int kIntGemvOutputs = 2, kIntGemvStrip = 8;

// Sums codes times X for each lane's unit, for several rows of w and of x together. Rows of w share
// the loads of x, and independent sums hide the latency of each instruction. The loops are unrolled
// so that registers hold everything.
template <class Format, int kPieces, int kTogether, int kOutputs>
MLX_ANVIL_UNROLLED void block_products(const u32v (&codes)[kOutputs][Bytes<Format>::kVectors],
                                       const char* x,
                                       const char* offsets,
                                       int64_t row_bytes,
                                       f32v (&products)[kTogether][kOutputs]) {
  constexpr int kVectors = Bytes<Format>::kVectors;
  // True if the combined sums of all pieces fit in 32 bits. Intermediate sums, which still contain
  // kOffset, may wrap around.
  constexpr int64_t kMost = Bytes<Format>::kMost;
  constexpr bool kFits = 4 * kVectors * kMost << (8 * kPieces - 1) <= int64_t{1} << 31;
  // One sum per piece.
  i32v sums[kTogether][kPieces][kOutputs] = {};
  if constexpr (Bytes<Format>::kOffset != 0) {
    static_assert(kFits);
    unroll<kTogether>([&](auto m) {
      unroll<kOutputs>([&](auto o) {
        sums[m.value][0][o.value] =
            load_bits<i32v>(reinterpret_cast<const int32_t*>(offsets + m.value * row_bytes));
      });
    });
  }
  unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
    unroll<kPieces>([&](auto piece) __attribute__((always_inline)) {
      unroll<kTogether>([&](auto m) __attribute__((always_inline)) {
        u32v bytes = load_bits<u32v>(reinterpret_cast<const uint32_t*>(
            x + m.value * row_bytes + (v.value * kPieces + piece.value) * 64));
        asm("" : "+v"(bytes));  // keeps it in a register; otherwise each use reloads it
        unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
          i32v& sum = sums[m.value][piece.value][o.value];
          sum = with_products(sum, codes[o.value][v.value], bytes);
        });
      });
    });
  });
  constexpr int kLast = kFits ? 0 : 1;
  unroll<kTogether>([&](auto m) __attribute__((always_inline)) {
    unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
      const auto of_piece = [&](int piece) { return sums[m.value][piece][o.value]; };
      u32v sum = bits_as<u32v>(of_piece(kPieces - 1));
      for (int piece = kPieces - 2; piece >= kLast; --piece) {
        sum = (sum << 8) + bits_as<u32v>(of_piece(piece));
      }
      f32v& product = products[m.value][o.value];
      product = __builtin_convertvector(bits_as<i32v>(sum), f32v);
      if constexpr (!kFits) {
        product = product * 256.0f + __builtin_convertvector(of_piece(0), f32v);
      }
    });
  });
}

// Rows of w are contiguous in memory: without strips, prefetch this far ahead.
constexpr int64_t kAheadWords = 8192 / sizeof(uint32_t);

template <class Format, int kPieces, int kRows>
class IntGemv {
 public:
  explicit IntGemv(const QuantizedGemvArgs& args)
      : args_(args),
        layout_(args.matrix),
        scales_(args.matrix, BlockUnits::kValues, args.scratch, BlockUnits::unit_of_lane),
        units_(layout_.columns / BlockUnits::kValues),
        ahead_words_(kInStrips ? kStrip * units_ * kWords : kAheadWords) {}

  void run() {
    for (int64_t n = 0; n < args_.count; n += kStrip) {
      const int64_t rows = args_.count - n < kStrip ? args_.count - n : kStrip;
      f32v totals[kStrip / kOutputs][kRows][kOutputs] = {};
      for (int64_t r = 0; r < rows; ++r) {
        scales_.read(args_.first + n + r, r);
      }
      for (int64_t block = 0; block < layout_.blocks; block += kBlocksAtOnce) {
        for (int64_t r = 0; r < rows; r += kOutputs) {
          multiply(n, r, block, totals[r / kOutputs]);
        }
      }
      for (int64_t r = 0; r < rows; r += kOutputs) {
        finish(n, r, totals[r / kOutputs]);
      }
    }
  }

 private:
  using BlockUnits = typename Bytes<Format>::BlockUnits;
  static constexpr int kVectors = Bytes<Format>::kVectors, kWords = BlockUnits::kWords;
  static constexpr int kOutputs = kIntGemvOutputs;     // rows of w together
  static constexpr int kTogether = kRows > 1 ? 2 : 1;  // rows of x together
  // Many rows of x exceed L1, and L2 is no faster than the multiplication. So a few blocks of x are
  // reused for a strip of rows of w.
  static constexpr bool kInStrips = kRows * kPieces > 8;
  static constexpr int kStrip = kInStrips ? kIntGemvStrip : kOutputs;
  static constexpr int64_t kBlocksAtOnce =
      kInStrips ? (1024 + kLanes * Bytes<Format>::kValues - 1) / (kLanes * Bytes<Format>::kValues)
                : int64_t{1} << 40;

  // Multiplies rows r to r + kOutputs of the strip at row n, for blocks from `block` on.
  void multiply(int64_t n, int64_t r, int64_t block, f32v (&totals)[kRows][kOutputs]) {
    const uint32_t* w[kOutputs];
    for (int o = 0; o < kOutputs; ++o) {
      // Past the last row of w, repeat it.
      const int64_t row = n + r + o < args_.count ? n + r + o : args_.count - 1;
      w[o] = args_.matrix.weights.w + (args_.first + row) * units_ * kWords;
    }
    const int64_t end =
        layout_.blocks - block < kBlocksAtOnce ? layout_.blocks : block + kBlocksAtOnce;
    const int64_t whole = units_ / kLanes < end ? units_ / kLanes : end;
    for (; block < whole; ++block) {
      add_block(w, r, block, totals,
                [](BlockUnits& to, const uint32_t* from) { to.load_whole(from); });
    }
    if (block < end) {
      add_block(w, r, block, totals, [&](BlockUnits& to, const uint32_t* from) {
        to.load_some(from, units_ - block * kLanes);
      });
    }
  }

  template <class Load>
  MLX_ANVIL_UNROLLED void add_block(const uint32_t* (&w)[kOutputs],
                                    int64_t r,
                                    int64_t block,
                                    f32v (&totals)[kRows][kOutputs],
                                    Load load) {
    u32v codes[kOutputs][kVectors];
    f32v scale[kOutputs];
    unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
      BlockUnits packed;
      const uint32_t* const from = w[o.value] + block * kLanes * kWords;
      load(packed, from);
      for (int line = 0; line < kWords; ++line) {
        // The line of the last word: that of the first may belong to the previous block.
        __builtin_prefetch(from + ahead_words_ + (line + 1) * kLanes - 1, 0, 2);
      }
      unroll<kVectors>([&](auto v) {
        codes[o.value][v.value] = Bytes<Format>::template vector<v.value>(packed);
      });
      scale[o.value] = scales_.scale(block, r + o.value);
    });
    const char* row = reinterpret_cast<const char*>(args_.x);
    const int64_t row_bytes = layout_.bytes();
    f32v(*total)[kOutputs] = totals;
    int rows = kRows;
    if constexpr (kRows > kTogether) {
      // Hides the trip count: compilers would unroll this loop fully and run out of registers.
      asm("" : "+r"(rows), "+r"(total));
    }
    for (; rows > 0; rows -= kTogether, total += kTogether, row += kTogether * row_bytes) {
      f32v products[kTogether][kOutputs];
      block_products<Format, kPieces, kTogether, kOutputs>(
          codes, row + block * layout_.block_columns * kPieces,
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

  void finish(int64_t n, int64_t r, const f32v (&totals)[kRows][kOutputs]) {
    // Copied by an unrolled loop, so that they stay in registers.
    f32v sums[kRows * kOutputs];
    unroll<kRows * kOutputs>([&](auto i) __attribute__((always_inline)) {
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
        unroll<kRows>([&](auto m) __attribute__((always_inline)) {
          const f32v of_x = load_lanes(reinterpret_cast<const float*>(x + m.value * row_bytes) + g);
          unroll<kOutputs>([&](auto o) __attribute__((always_inline)) {
            sums[m.value * kOutputs + o.value] += bias[o.value] * of_x;
          });
        });
      }
    }
    const f32v results = sums_of_lanes<kRows * kOutputs>(sums) * Format::kFactor;
    for (int o = 0; o < kOutputs && n + r + o < args_.count; ++o) {
      for (int m = 0; m < kRows; ++m) {
        args_.out[m * args_.count + n + r + o] = results[m * kOutputs + o];
      }
    }
  }

  const QuantizedGemvArgs& args_;
  const IntRowLayout layout_;
  RowScales scales_;
  const int64_t units_;
  const int64_t ahead_words_;  // with strips: to the same columns of the next strip
};

template <class Format, int kPieces>
void multiply_rows(const QuantizedGemvArgs& args) {
  switch (args.x_rows) {
    case 1:
      return IntGemv<Format, kPieces, 1>(args).run();
    case 2:
      return IntGemv<Format, kPieces, 2>(args).run();
    case 4:
      return IntGemv<Format, kPieces, 4>(args).run();
    default:
      return IntGemv<Format, kPieces, 8>(args).run();
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
    finite = pieces_of(matrix.dtype) == 3 ? pack_row<Format, 3>(matrix, x, static_cast<char*>(to))
                                          : pack_row<Format, 2>(matrix, x, static_cast<char*>(to));
  });
  return finite;
}

void quantized_int_gemv(const QuantizedGemvArgs& args) {
  with_int_format(args.matrix.format, [&](auto format) {
    using Format = decltype(format);
    pieces_of(args.matrix.dtype) == 3 ? multiply_rows<Format, 3>(args)
                                      : multiply_rows<Format, 2>(args);
  });
}

int64_t quantized_int_gemv_scratch(const QuantizedMatrixView& matrix) {
  return kIntGemvStrip * RowScales::scratch(matrix);
}

#else

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

// The products of cpu_gemv.cpp in integers, where the machine has byte products (VNNI):
//
//   x ~= step * X,  X = X0 + 256 X1 (+ 65536 X2), each X_i a signed byte, one step for each block
//   sum of code * x ~= step * (sum of code * X), which is exact
//
// Two bytes for the 16-bit dtypes, three for float32: against the largest number of a block an
// element is off by at most 2^-16 or 2^-24.
//
// A vector holds words of 16 rows of w, one in each lane, so that a lane's sum is that of a row:
// scales are applied once for each group, however many words it has, and a word of x is read once
// for 16 rows. Where codes come from memory as rows, 16 vectors are transposed.
//
// Sums in integers are exact, and those in float32 take the same steps for every number of rows.
#include "quantized_matmul/cpu_entries.h"
#if defined(__AVX512VNNI__)
#include "quantized_matmul/cpu_int_rows.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

// Scales and biases of `kLanes` rows of w: for each group a vector, a row in each lane.
class BandScales {
 public:
  static int64_t scratch(const QuantizedMatrixView& matrix) {
    return 2 * kLanes * padded(matrix.columns / matrix.format.group);
  }

  BandScales(const QuantizedMatrixView& matrix, float* scratch)
      : matrix_(matrix),
        groups_(matrix.columns / matrix.format.group),
        scales_(scratch),
        biases_(scratch + kLanes * padded(groups_)) {}

  // Of rows [first, first + rows), in lanes beyond those of the first one.
  void read(int64_t first, int64_t rows) {
    read_all(matrix_.weights.scales, first, rows, scales_);
    if (matrix_.weights.biases) {
      read_all(matrix_.weights.biases, first, rows, biases_);
    }
  }

  f32v scale(int64_t group) const { return load_lanes(scales_ + group * kLanes); }
  f32v bias(int64_t group) const { return load_lanes(biases_ + group * kLanes); }

 private:
  void read_all(const void* numbers, int64_t first, int64_t rows, float* to) {
    const int64_t total = matrix_.outputs * groups_;
    with_scales(matrix_, numbers, [&](const auto* from, auto widen) {
      for (int64_t group = 0; group < groups_; group += kLanes) {
        f32v square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int64_t at = (first + (i < rows ? i : 0)) * groups_ + group;
          square[i] = widen_some(from + at, total - at, widen);
        }
        transpose(square);
        for (int i = 0; i < kLanes; ++i) {
          store_lanes(to + (group + i) * kLanes, square[i]);
        }
      }
    });
  }

  const QuantizedMatrixView& matrix_;
  const int64_t groups_;
  float *const scales_, *const biases_;
};

// Blocks of 16 rows of w in memory, `step` bytes apart.
struct BlockRows {
  const char* first;
  int64_t step;

  // to[i]: word 4 q + i of every row.
  [[gnu::always_inline]] void load_quarter(int q, u32v* to) const {
    // Every fourth row, four words of each; then squares of 4 x 4 words are transposed.
    const auto load = [&](int row) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + row * step + 16 * q));
    };
    __m512i rows[4];
    unroll<4>([&](auto i) __attribute__((always_inline)) {
      __m512i quarters = _mm512_broadcast_i32x4(load(i.value));
      quarters = _mm512_mask_broadcast_i32x4(quarters, 0x00f0, load(4 + i.value));
      quarters = _mm512_mask_broadcast_i32x4(quarters, 0x0f00, load(8 + i.value));
      rows[i.value] = _mm512_mask_broadcast_i32x4(quarters, 0xf000, load(12 + i.value));
    });
    const __m512i low02 = _mm512_unpacklo_epi32(rows[0], rows[2]);
    const __m512i high02 = _mm512_unpackhi_epi32(rows[0], rows[2]);
    const __m512i low13 = _mm512_unpacklo_epi32(rows[1], rows[3]);
    const __m512i high13 = _mm512_unpackhi_epi32(rows[1], rows[3]);
    to[0] = bits_as<u32v>(_mm512_unpacklo_epi32(low02, low13));
    to[1] = bits_as<u32v>(_mm512_unpackhi_epi32(low02, low13));
    to[2] = bits_as<u32v>(_mm512_unpacklo_epi32(high02, high13));
    to[3] = bits_as<u32v>(_mm512_unpackhi_epi32(high02, high13));
  }
};

template <class Format, int kPieces, int kRows>
class IntGemv {
 public:
  explicit IntGemv(const QuantizedGemvArgs& args)
      : args_(args),
        layout_(args.matrix, Codes::kColumns, kRows),
        scales_(args.matrix, args.scratch),
        x_(reinterpret_cast<const int32_t*>(args.x)) {}

  void run() {
    for (int64_t n = 0; n < args_.count; n += kLanes) {
      band(n);
    }
  }

 private:
  using Codes = Bytes<Format>;
  // Rows of x whose sums registers hold at once.
  static constexpr int kAtOnce = kRows * kPieces <= 16 ? kRows : 4;
  // Sums of one row and piece: as many as hide how long an instruction takes.
  static constexpr int kSums = kAtOnce * kPieces >= 8 ? 1 : kAtOnce * kPieces >= 3 ? 2 : 4;
  static constexpr int kOffset = Format::kHasBiases ? 0 : Format::kOffset;
  static constexpr int kWordsAtOnce = 2;  // every group has an even number of words

  void band(int64_t n) {
    const int64_t rows = args_.count - n < kLanes ? args_.count - n : kLanes;
    scales_.read(args_.first + n, rows);
    f32v totals[kRows] = {};
    u32v words[2][kLanes];  // of a block and of the next one
    BlockRows next = find_block(n, rows, 0);
    for (int q = 0; q < 4; ++q) {
      next.load_quarter(q, words[0] + 4 * q);
    }
    for (int64_t block = 0; block < layout_.blocks; ++block) {
      const u32v* const now = words[block % 2];
      u32v* const then = words[(block + 1) % 2];
      next = find_block(n, rows, block + 1 < layout_.blocks ? block + 1 : block);
      add_block<0>(block, now, totals, [&](int q) __attribute__((always_inline)) {
        next.load_quarter(q, then + 4 * q);
      });
      unroll<kRows / kAtOnce - 1>(
          [&](auto i) { add_block<(1 + i.value) * kAtOnce>(block, now, totals, [](int) {}); });
    }
    finish(n, rows, totals);
  }

  // Where it can be read in words: in place, or unpacked.
  BlockRows find_block(int64_t n, int64_t rows, int64_t block) {
    const int64_t row_bytes = layout_.columns * Format::kBits / 8;
    const int64_t bytes = row_bytes - block * Codes::kBlockBytes;
    const char* const w = reinterpret_cast<const char*>(args_.matrix.weights.w) +
                          (args_.first + n) * row_bytes + block * Codes::kBlockBytes;
    // The next band, which follows in memory: as much of it as this block is of this one.
    const char* const ahead = w + (kLanes * row_bytes + (kLanes - 1) * block * Codes::kBlockBytes);
    for (int64_t line = 0; line < kLanes * Codes::kBlockBytes; line += 64) {
      __builtin_prefetch(ahead + line, 0, 2);
    }
    if (Codes::kWhole && bytes >= Codes::kBlockBytes && rows == kLanes) {
      return {w, row_bytes};
    }
    for (int i = 0; i < kLanes; ++i) {
      unpacked_[i] = Codes::words(w + i * row_bytes, i < rows ? bytes : 0);
    }
    return {reinterpret_cast<const char*>(unpacked_), sizeof(u32v)};
  }

  // One block of 16 rows of w, times kAtOnce rows of x from kRow on. load(q) loads a quarter of the
  // next block: here and there between products, which take longer.
  template <int kRow, class Load>
  void add_block(int64_t block, const u32v* words, f32v (&totals)[kRows], Load load) const {
    const int64_t first = block * Codes::kColumns;
    const int64_t columns =
        layout_.columns - first < Codes::kColumns ? layout_.columns - first : Codes::kColumns;
    const int64_t part = layout_.group < Codes::kColumns ? layout_.group : Codes::kColumns;
    const int32_t* x = x_ + block * layout_.block_words() + kRow * kPieces;
    const float* const steps =
        reinterpret_cast<const float*>(x_ + layout_.steps_at()) + block * kRows + kRow;
    int word = 0;
    for (int64_t column = 0; column < columns; column += part) {
      i32v sums[kSums][kAtOnce * kPieces] = {};
      for (int64_t i = 0; i < part; i += 4 * Codes::kPerWord * kWordsAtOnce) {
        if (word % 4 == 0) {
          load(word / 4);
        }
        unroll<kWordsAtOnce * Codes::kPerWord>([&](auto v) {
          const u32v codes = Codes::template bytes<v.value % Codes::kPerWord>(
              words[word + v.value / Codes::kPerWord]);
          unroll<kAtOnce * kPieces>([&](auto s) {
            i32v& sum = sums[v.value % kSums][s.value];
            sum = with_products(sum, codes, x[v.value * kRows * kPieces + s.value]);
          });
        });
        word += kWordsAtOnce;
        x += kWordsAtOnce * Codes::kPerWord * kRows * kPieces;
      }
      const int64_t group = (first + column) >> layout_.group_shift;
      const f32v scale = scales_.scale(group);
      const int32_t* const sums_of_x = x_ + layout_.sums_at() + group * kRows + kRow;
      unroll<kAtOnce>([&](auto r) {
        i32v pieces[kPieces];
        unroll<kPieces>([&](auto p) {
          pieces[p.value] = sums[0][r.value * kPieces + p.value];
          unroll<kSums - 1>(
              [&](auto s) { pieces[p.value] += sums[1 + s.value][r.value * kPieces + p.value]; });
        });
        // In this order: a scale may be so small that its product with the step is not a number of
        // full precision.
        totals[kRow + r.value] +=
            in_floats<Format, Format::kLargestGroup>(pieces, kOffset, sums_of_x[r.value]) *
            steps[r.value] * scale;
      });
    }
  }

  void finish(int64_t n, int64_t rows, f32v (&totals)[kRows]) {
    for (f32v& total : totals) {
      total *= Format::kFactor;
    }
    if constexpr (Format::kHasBiases) {
      const float* const sums = reinterpret_cast<const float*>(x_ + layout_.sums_at());
      for (int64_t group = 0; group < layout_.groups; ++group) {
        const f32v bias = scales_.bias(group);
        for (int m = 0; m < kRows; ++m) {
          totals[m] += bias * sums[group * kRows + m];
        }
      }
    }
    for (int m = 0; m < kRows; ++m) {
      std::memcpy(args_.out + m * args_.count + n, &totals[m], rows * sizeof(float));
    }
  }

  const QuantizedGemvArgs& args_;
  const IntRowsLayout layout_;
  BandScales scales_;
  const int32_t* const x_;
  alignas(64) u32v unpacked_[kLanes];
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

template <class Format>
IntRowsLayout layout_of(const QuantizedMatrixView& matrix, int64_t rows) {
  return IntRowsLayout(matrix, Bytes<Format>::kColumns, rows);
}

}  // namespace

int64_t quantized_int_words(const QuantizedMatrixView& matrix, int64_t rows) {
  int64_t words = 0;
  if (matrix.format.kind != QuantizedKind::kMxfp8) {
    with_int_format(matrix.format, [&](auto format) {
      words = layout_of<decltype(format)>(matrix, rows).words();
    });
  }
  return words;
}

bool quantized_int_pack(
    const QuantizedMatrixView& matrix, const float* x, int64_t m, int64_t rows, void* to) {
  bool finite = false;
  with_int_format(matrix.format, [&](auto format) {
    using Format = decltype(format);
    finite =
        pack_row<Format>(matrix, x, m, layout_of<Format>(matrix, rows), static_cast<int32_t*>(to));
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
  return BandScales::scratch(matrix);
}

#else

int64_t quantized_int_words(const QuantizedMatrixView&, int64_t) {
  return 0;
}
bool quantized_int_pack(const QuantizedMatrixView&, const float*, int64_t, int64_t, void*) {
  return false;
}
void quantized_int_gemv(const QuantizedGemvArgs&) {}
int64_t quantized_int_gemv_scratch(const QuantizedMatrixView&) {
  return 0;
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

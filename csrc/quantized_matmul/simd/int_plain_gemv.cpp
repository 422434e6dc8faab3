// The products of cpu_plain_gemv.cpp in integers, where the machine has byte products:
//
//   sum over n of x[n] scale[n, g] code[n, k] ~= step[g] * (sum over n of X[n, g] code[n, k])
//
// for a band of rows n at a time, X as in cpu_int_gemv.cpp. A lane is a column and has the codes of
// four rows, whose bytes are interleaved. A band is unpacked once for all rows of x.
#include <algorithm>

#include "quantized_matmul/simd/entries.h"
#if defined(__AVX512VNNI__)
#include "quantized_matmul/simd/int_factors.h"
#include "quantized_matmul/simd/int_interleave.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

template <class Format, int kPieces, int kRows>
class IntPlainGemv {
 public:
  explicit IntPlainGemv(const QuantizedPlainGemvArgs& args)
      : args_(args),
        row_bytes_(args.matrix.columns * Format::kBits / 8),
        skipped_bytes_(skipped_columns(args.matrix) * Format::kBits / 8),
        group_shift_(__builtin_ctz(static_cast<unsigned>(args.matrix.format.group))) {
    if constexpr (kSkips) {
      std::fill_n(factors_, 2, Factors{});  // see read_factors()
    }
  }

  // Blocks begin where cache lines do, if they are lines: else two blocks have a part of each line,
  // and when the second comes, so many other rows have been read that the nearest cache has lost
  // it. Only where groups may begin in a block wherever arrays begin in a line.
  static int64_t skipped_columns(const QuantizedMatrixView& matrix) {
    const bool rows_alike = matrix.columns * Format::kBits / 8 % 64 == 0;
    const uintptr_t w = reinterpret_cast<uintptr_t>(matrix.weights.w);
    return kSkips && rows_alike && w % 8 == 0 ? static_cast<int64_t>(w % 64) * 8 / Format::kBits
                                              : 0;
  }

  // A row of sums to the order of columns.
  static void put_in_order(float* row, int64_t blocks) {
    constexpr int64_t kCount = Codes::template kOrdered<kDirect>;
    for (float* at = row; at < row + blocks * Codes::kColumns; at += kCount) {
      float vectors[kCount];
      std::memcpy(vectors, at, sizeof(vectors));
      Codes::template store_in_order<kDirect>(vectors, at);
    }
  }

  // False: a number is not finite.
  bool run() {
    for (int64_t i = 0; i < kRows * row_step(); i += kLanes) {
      store_lanes(args_.out + i, f32v{});
    }
    for (int64_t n = 0; n < args_.count; n += kBandRows) {
      const int64_t rows = args_.count - n < kBandRows ? args_.count - n : kBandRows;
      const bool last = n + kBandRows >= args_.count;
      ahead_ = last ? at(args_.next - args_.first, args_.next_block)
                    : at(n + kBandRows, args_.first_block);
      ahead_bytes_ = 0;
      for (int64_t block = 0; block < args_.blocks; ++block) {
        if (block % blocks_at_once() == 0 && !read_factors(n, rows, args_.first_block + block)) {
          return false;
        }
        if (is_whole(args_.first_block + block)) {
          multiply_block<true>(n, rows, block);
        } else {
          multiply_block<false>(n, rows, block);
        }
      }
    }
    return true;
  }

 private:
  using Codes = RowBytes<Format>;
  static constexpr int kVectors = Codes::kVectors;
  // Whether registers hold the sums of a whole block, beside what interleaving takes: then bytes
  // are multiplied as soon as they are interleaved, by quarters, which may be of several groups.
  // Else they are stored, for some vectors after others, each of one group.
  static constexpr bool kDirect = kRows * kPieces * kVectors <= 24;
  // And more of factors than one vector of each piece.
  static constexpr bool kSkips =
      kDirect && kRows * kPieces * kVectors <= 16 && Codes::kWhole && Codes::kBlockBytes == 64;
  // Parts of a block's quarters that are of one group each.
  static constexpr int kParts = kSkips ? 2 : 1;
  using Factors = BandFactors<kPieces, kRows, Format::kOffset, kDirect>;
  // Vectors of columns whose sums registers hold at once.
  static constexpr int kAtOnce = kRows * kPieces <= 4 ? 4 : kRows * kPieces <= 8 ? 2 : 1;

  int64_t row_step() const { return args_.blocks * Codes::kColumns; }

  // Blocks whose groups are a vector's lanes, but for the columns that the first has of a group
  // before.
  int64_t blocks_at_once() const { return (int64_t{kLanes} << group_shift_) / Codes::kColumns; }

  // Of a block of the matrix. Below 0 in the first, where it begins before the row.
  int64_t first_byte(int64_t block) const { return block * Codes::kBlockBytes - skipped_bytes_; }
  int64_t first_column(int64_t block) const { return first_byte(block) * 8 / Format::kBits; }

  const char* at(int64_t n, int64_t block) const {
    return reinterpret_cast<const char*>(args_.matrix.weights.w) + (args_.first + n) * row_bytes_ +
           first_byte(block);
  }

  // Of the blocks from this one on, blocks_at_once() of them. False: a number is not finite.
  bool read_factors(int64_t n, int64_t rows, int64_t block) {
    first_group_ = block * Codes::kColumns >> group_shift_;
    if (skipped_bytes_ > 0) {
      if (block > 0 && block == args_.first_block &&
          !factors_[now_].read(args_, n, rows, first_group_ - kLanes)) {
        return false;
      }
      now_ = 1 - now_;
    }
    // The last block of a row may have columns of the group before only. Those beyond the row then
    // take what was read for other rows, or zeros.
    return first_group_ << group_shift_ >= args_.matrix.columns ||
           factors_[now_].read(args_, n, rows, first_group_);
  }

  // Its first column from that of factors_[now_] on. Below 0: the columns before are of the factors
  // before those.
  int64_t column_of_factors(int64_t block) const {
    return first_column(block) - (first_group_ << group_shift_);
  }

  // Whether it is of these factors only, and a row has all of its bytes.
  bool is_whole(int64_t block) const {
    return column_of_factors(block) >= 0 && row_bytes_ - first_byte(block) >= Codes::kBlockBytes;
  }

  // Asks for some of the next band, as many bytes as a quad of a block has: row after row of the
  // strip, since memory gives soonest what is next to what it gave.
  void prefetch_some() {
    for (int64_t end = ahead_bytes_ + 4 * Codes::kBlockBytes; ahead_bytes_ < end;
         ahead_bytes_ += 64) {
      __builtin_prefetch(ahead_ + ahead_bytes_, 0, 2);
    }
    if (ahead_bytes_ >= args_.blocks * Codes::kBlockBytes) {
      ahead_ += row_bytes_;
      ahead_bytes_ = 0;
    }
  }

  // kWhole: is_whole() says so.
  template <bool kWhole>
  void multiply_block(int64_t n, int64_t rows, int64_t block) {
    if constexpr (kDirect) {
      multiply_directly<kWhole>(n, rows, block);
    } else {
      interleave<kWhole>(n, rows, args_.first_block + block);
      constexpr int kStep = kAtOnce < Codes::kPerWord ? Codes::kPerWord : kAtOnce;
      for (int vector = 0; vector < kVectors; vector += kStep) {
        unroll<kStep / kAtOnce>(
            [&](auto part) { multiply<part.value * kAtOnce>(block, vector, (rows + 3) / 4); });
      }
    }
  }

  template <bool kWhole>
  void interleave(int64_t n, int64_t rows, int64_t block) {
    const __mmask64 in_row = Codes::in_row(0, row_bytes_ - first_byte(block));
    const char* w = at(n, block);
    for (int quad = 0; quad < kQuads && 4 * quad < rows; ++quad, w += 4 * row_bytes_) {
      prefetch_some();
      interleave_quad<Codes, kWhole>(w, row_bytes_, rows - 4 * quad, in_row, packed_[quad]);
    }
  }

  // The lane of its group. Beyond a row's last column any will do.
  int64_t group_of(int64_t block, int vector) const {
    const int64_t column = column_of_factors(args_.first_block + block) + Codes::column(vector);
    const int64_t group = column >> group_shift_;
    return group < kLanes ? group : kLanes - 1;
  }

  // Vectors of columns, kAtOnce of them: from kIndex on after `whole`, the first of a word's.
  template <int kIndex>
  void multiply(int64_t block, int whole, int64_t quads) {
    const int first = whole + kIndex;
    int64_t groups[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      groups[v] = group_of(block, first + v);
    }
    i32v sums[kAtOnce][kRows * kPieces] = {};
    for (int64_t quad = 0; quad < quads; ++quad) {
      unroll<kAtOnce>([&](auto v) __attribute__((always_inline)) {
        constexpr int kVector = kIndex + v.value;
        const u32v codes = Codes::template bytes<kVector % Codes::kPerWord>(
            packed_[quad][whole / Codes::kPerWord + kVector / Codes::kPerWord]);
        add_products(sums[v.value], codes, groups[v.value], quad);
      });
    }
    unroll<kAtOnce>([&](auto v) __attribute__((always_inline)) {
      unroll<kRows>([&](auto m) __attribute__((always_inline)) {
        add_sums(block, first + v.value, m.value, sums[v.value] + m.value * kPieces,
                 factors_[0].sum(m.value, groups[v.value]),
                 factors_[0].exponent(m.value, groups[v.value]),
                 factors_[0].shift(m.value, groups[v.value]));
      });
    });
  }

  // Both at once, for a block.
  template <bool kWhole>
  void multiply_directly(int64_t n, int64_t rows, int64_t block) {
    const int64_t in_matrix = args_.first_block + block;
    const int64_t byte = first_byte(in_matrix);
    const __mmask64 in_row = Codes::in_row(byte < 0 ? -byte : 0, row_bytes_ - byte);
    const char* w = at(n, in_matrix);
    // Groups' lanes. Those of groups before are the highest, which no other column of the block
    // has. Columns before the first of the row are none: any lanes will do.
    const int64_t first = column_of_factors(in_matrix);
    u32v groups[kParts];
    for (int part = 0; part < kParts; ++part) {
      for (int lane = 0; lane < kLanes; ++lane) {
        groups[part][lane] =
            static_cast<uint32_t>(Codes::column_by_quarters(part * kVectors / kParts, lane));
      }
      groups[part] = (groups[part] + static_cast<uint32_t>(first)) >> group_shift_;
    }
    const int64_t before = byte < 0 || first > 0 ? 0 : -(first >> group_shift_);
    const __mmask16 lanes_before = static_cast<__mmask16>(~0u << (kLanes - before));
    // A vector of each part, of what factors have for groups.
    const auto of_lanes = [&](auto& parts, auto of_factors) __attribute__((always_inline)) {
      auto of_groups = of_factors(factors_[now_]);
      using Vector = decltype(of_groups);
      if constexpr (kSkips && !kWhole) {
        of_groups = bits_as<Vector>(
            _mm512_mask_mov_epi32(bits_as<__m512i>(of_groups), lanes_before,
                                  bits_as<__m512i>(of_factors(factors_[1 - now_]))));
      }
      unroll<kParts>([&](auto part) __attribute__((always_inline)) {
        parts[part.value] = bits_as<Vector>(lookup(bits_as<f32v>(of_groups), groups[part.value]));
      });
    };
    i32v sums[kVectors][kRows * kPieces] = {};
    for (int64_t quad = 0; 4 * quad < rows; ++quad, w += 4 * row_bytes_) {
      prefetch_some();
      u32v bytes[4], x[kRows * kPieces][kParts];
      interleave_quarters<Codes, kWhole>(w, row_bytes_, rows - 4 * quad, in_row, bytes);
      unroll<kRows * kPieces>([&](auto s) __attribute__((always_inline)) {
        of_lanes(x[s.value], [&](const Factors& factors) __attribute__((always_inline)) {
          return factors.words(quad, s.value / kPieces, s.value % kPieces);
        });
      });
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        constexpr int kPart = v.value * kParts / kVectors;
        const u32v codes =
            Codes::template nested<v.value % Codes::kPerWord>(bytes[v.value / Codes::kPerWord]);
        unroll<kRows * kPieces>([&](auto s) __attribute__((always_inline)) {
          sums[v.value][s.value] = with_products(sums[v.value][s.value], codes, x[s.value][kPart]);
        });
      });
    }
    Codes::unnest(sums);
    unroll<kRows>([&](auto m) __attribute__((always_inline)) {
      i32v sum[kParts];
      f32v exponent[kParts], shift[kParts];
      of_lanes(sum, [&](const Factors& factors) { return factors.sums(m.value); });
      of_lanes(exponent, [&](const Factors& factors) { return factors.exponents(m.value); });
      of_lanes(shift, [&](const Factors& factors) { return factors.shifts(m.value); });
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        constexpr int kPart = v.value * kParts / kVectors;
        add_sums(block, v.value, m.value, sums[v.value] + m.value * kPieces, sum[kPart],
                 exponent[kPart], shift[kPart]);
      });
    });
  }

  MLX_ANVIL_UNROLLED void add_products(i32v (&sums)[kRows * kPieces],
                                       u32v codes,
                                       int64_t group,
                                       int64_t quad) const {
    unroll<kRows * kPieces>([&](auto s) __attribute__((always_inline)) {
      i32v& sum = sums[s.value];
      sum = with_products(sum, codes,
                          factors_[0].word(group, quad, s.value / kPieces, s.value % kPieces));
    });
  }

  // The sums of a band to the totals of a vector of columns, for row m of x. What is said of groups
  // is one number or a vector.
  template <class Sum, class Number>
  MLX_ANVIL_UNROLLED void add_sums(int64_t block,
                                   int vector,
                                   int m,
                                   const i32v* sums,
                                   Sum sum_of_x,
                                   Number exponent,
                                   Number shift) {
    i32v pieces[kPieces];
    for (int p = 0; p < kPieces; ++p) {
      pieces[p] = sums[p];
    }
    const f32v sum = in_floats<Format, kBandRows>(pieces, Format::kOffset, sum_of_x);
    float* const total = args_.out + m * row_step() + block * Codes::kColumns + vector * kLanes;
    const f32v product = times_power(sum, f32v{} + exponent);
    store_lanes(total, load_lanes(total) + (product * (Format::kFactor / Factors::kScale) + shift));
  }

  const QuantizedPlainGemvArgs& args_;
  const int64_t row_bytes_, skipped_bytes_;
  const int group_shift_;
  int64_t first_group_ = 0;  // of factors_[now_]
  int now_ = 0;
  Factors factors_[kSkips ? 2 : 1];  // and those before
  const char* ahead_ = nullptr;      // a row of the next band
  int64_t ahead_bytes_ = 0;
  // Bytes of four rows side by side, before they are taken apart into codes: half as much to store
  // of 4 bits.
  alignas(64) u32v packed_[kQuads][4];
};

// action(type) with the kernel of these.
template <class Action>
void with_kernel(const QuantizedMatrixView& matrix, int64_t x_rows, Action action) {
  with_int_format(matrix.format, [&](auto format) {
    using Format = decltype(format);
    const auto of_rows = [&](auto pieces) {
      constexpr int kPieces = pieces.value;
      switch (x_rows) {
        case 1:
          return action(std::type_identity<IntPlainGemv<Format, kPieces, 1>>());
        case 2:
          return action(std::type_identity<IntPlainGemv<Format, kPieces, 2>>());
        case 4:
          return action(std::type_identity<IntPlainGemv<Format, kPieces, 4>>());
        default:
          return action(std::type_identity<IntPlainGemv<Format, kPieces, 8>>());
      }
    };
    // Three bytes of each product for float32, two for the 16-bit dtypes.
    matrix.dtype == KernelDtype::kFloat32 ? of_rows(std::integral_constant<int, 3>())
                                          : of_rows(std::integral_constant<int, 2>());
  });
}

}  // namespace

int64_t quantized_int_plain_columns(const QuantizedMatrixView& matrix) {
  int64_t columns = 0;
  if (matrix.format.kind != QuantizedKind::kMxfp8) {
    with_int_format(matrix.format, [&](auto format) {
      using Codes = RowBytes<decltype(format)>;
      // The columns of a vector have to be of one group.
      const bool one_group = matrix.format.group >= kLanes * Codes::kPerWord;
      columns = one_group ? Codes::kColumns : 0;
    });
  }
  return columns;
}

int64_t quantized_int_plain_skipped(const QuantizedMatrixView& matrix, int64_t x_rows) {
  int64_t columns = 0;
  with_kernel(matrix, x_rows, [&]<class Kernel>(std::type_identity<Kernel>) {
    columns = Kernel::skipped_columns(matrix);
  });
  return columns;
}

void quantized_int_plain_order(const QuantizedMatrixView& matrix,
                               int64_t x_rows,
                               int64_t blocks,
                               float* row) {
  with_kernel(matrix, x_rows,
              [&]<class Kernel>(std::type_identity<Kernel>) { Kernel::put_in_order(row, blocks); });
}

bool quantized_int_plain_gemv(const QuantizedPlainGemvArgs& args) {
  bool finite = false;
  with_kernel(args.matrix, args.x_rows,
              [&]<class Kernel>(std::type_identity<Kernel>) { finite = Kernel(args).run(); });
  return finite;
}

#else

int64_t quantized_int_plain_columns(const QuantizedMatrixView&) {
  return 0;
}
int64_t quantized_int_plain_skipped(const QuantizedMatrixView&, int64_t) {
  return 0;
}
void quantized_int_plain_order(const QuantizedMatrixView&, int64_t, int64_t, float*) {}
bool quantized_int_plain_gemv(const QuantizedPlainGemvArgs&) {
  return false;
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// Integer version of plain_gemv.cpp, on machines with VNNI:
//   sum over n of x[n] scale[n, g] code[n, k] ~= step[g] * (sum over n of X[n, g] code[n, k])
// for a band of rows n at a time, with X as in int_gemv.cpp. A lane is a column and has the
// interleaved codes of four rows. A band is unpacked once for all rows of x.
//
//   for each band of rows of w: for each block of columns:
//     X = x * scale as bytes, for the groups of the next blocks        (BandFactors)
//     for each four rows: interleave their codes; prefetch part of the next band
//       sums += codes * X                                              (vpdpbusd)
//     out += sums * 2^exponent + shift
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

  // Aligns blocks to cache lines if a block is one line. Otherwise two blocks share a line, and by
  // the time the second needs it, L1 has evicted it. Applies only if groups may start anywhere in a
  // block.
  static int64_t skipped_columns(const QuantizedMatrixView& matrix) {
    const bool rows_alike = matrix.columns * Format::kBits / 8 % 64 == 0;
    const uintptr_t w = reinterpret_cast<uintptr_t>(matrix.weights.w);
    return kSkips && rows_alike && w % 8 == 0 ? static_cast<int64_t>(w % 64) * 8 / Format::kBits
                                              : 0;
  }

  // Reorders a row of sums into the order of columns.
  static void put_in_order(float* row, int64_t blocks) {
    constexpr int64_t kCount = Codes::template kOrdered<kDirect>;
    for (float* at = row; at < row + blocks * Codes::kColumns; at += kCount) {
      float vectors[kCount];
      std::memcpy(vectors, at, sizeof(vectors));
      Codes::template store_in_order<kDirect>(vectors, at);
    }
  }

  // Returns false if a value is not finite.
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
  // True if registers hold the sums of a whole block while interleaving. Then bytes are multiplied
  // as soon as they are interleaved, by quarters, which may span groups. Otherwise they are stored
  // and multiplied a few vectors at a time, each within one group.
  static constexpr bool kDirect = kRows * kPieces * kVectors <= 24;
  // kDirect with registers to spare for a second vector of factors per piece.
  static constexpr bool kSkips =
      kDirect && kRows * kPieces * kVectors <= 16 && Codes::kWhole && Codes::kBlockBytes == 64;
  // Parts of a block's quarters, each within one group.
  static constexpr int kParts = kSkips ? 2 : 1;
  using Factors = BandFactors<kPieces, kRows, Format::kOffset, kDirect>;
  // Vectors of columns whose sums fit in registers together.
  static constexpr int kAtOnce = kRows * kPieces <= 4 ? 4 : kRows * kPieces <= 8 ? 2 : 1;

  int64_t row_step() const { return args_.blocks * Codes::kColumns; }

  // Blocks that span one vector of groups. With skipped columns, the first of them also has columns
  // of the previous group.
  int64_t blocks_at_once() const { return (int64_t{kLanes} << group_shift_) / Codes::kColumns; }

  // First byte of a block in its row. Negative if the block starts before the row.
  int64_t first_byte(int64_t block) const { return block * Codes::kBlockBytes - skipped_bytes_; }
  int64_t first_column(int64_t block) const { return first_byte(block) * 8 / Format::kBits; }

  const char* at(int64_t n, int64_t block) const {
    return reinterpret_cast<const char*>(args_.matrix.weights.w) + (args_.first + n) * row_bytes_ +
           first_byte(block);
  }

  // Reads the factors of blocks_at_once() blocks from `block` on. Returns false if a value is not
  // finite.
  bool read_factors(int64_t n, int64_t rows, int64_t block) {
    first_group_ = block * Codes::kColumns >> group_shift_;
    if (skipped_bytes_ > 0) {
      if (block > 0 && block == args_.first_block &&
          !factors_[now_].read(args_, n, rows, first_group_ - kLanes)) {
        return false;
      }
      now_ = 1 - now_;
    }
    // The last block may have columns of the previous group only. Columns past the row then use
    // stale factors or zeros, and their results are not stored.
    return first_group_ << group_shift_ >= args_.matrix.columns ||
           factors_[now_].read(args_, n, rows, first_group_);
  }

  // First column of a block, relative to factors_[now_]. Columns below 0 use the previous factors.
  int64_t column_of_factors(int64_t block) const {
    return first_column(block) - (first_group_ << group_shift_);
  }

  // True if the block lies within these factors and within the row.
  bool is_whole(int64_t block) const {
    return column_of_factors(block) >= 0 && row_bytes_ - first_byte(block) >= Codes::kBlockBytes;
  }

  // Prefetches some of the next band: as many bytes as a quad of a block, row by row along the
  // strip, since DRAM delivers adjacent lines fastest.
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

  // kWhole is the result of is_whole().
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

  // Returns the lane of the vector's group. Past the row's last column, any lane will do.
  int64_t group_of(int64_t block, int vector) const {
    const int64_t column = column_of_factors(args_.first_block + block) + Codes::column(vector);
    const int64_t group = column >> group_shift_;
    return group < kLanes ? group : kLanes - 1;
  }

  // Multiplies kAtOnce vectors of columns, from kIndex on after `whole`, the first vector of its
  // word.
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

  // Interleaves and multiplies a block in one pass.
  template <bool kWhole>
  void multiply_directly(int64_t n, int64_t rows, int64_t block) {
    const int64_t in_matrix = args_.first_block + block;
    const int64_t byte = first_byte(in_matrix);
    const __mmask64 in_row = Codes::in_row(byte < 0 ? -byte : 0, row_bytes_ - byte);
    const char* w = at(n, in_matrix);
    // Maps columns to lanes of groups. Previous groups use the highest lanes, which no other column
    // of the block uses. Columns before the row use arbitrary lanes; their results are not stored.
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
    // Looks up per-group factors for the lanes of each part.
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

  // Adds the sums of a band to the totals of a vector of columns, for row m of x. Per-group
  // arguments are scalars or vectors.
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
  Factors factors_[kSkips ? 2 : 1];  // current and previous factors
  const char* ahead_ = nullptr;      // a row of the next band
  int64_t ahead_bytes_ = 0;
  // Interleaved bytes of four rows, not yet split into codes: 4-bit codes then take half the
  // stores.
  alignas(64) u32v packed_[kQuads][4];
};

// Calls action(type_identity of the kernel class) for the format, dtype and number of rows.
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
    // float32 needs three bytes per factor, the 16-bit dtypes two.
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
      // The columns of a vector must share a group.
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

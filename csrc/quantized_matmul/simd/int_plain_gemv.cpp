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
#include "quantized_matmul/simd/entries.h"
#if defined(__AVX512VNNI__)
#include "quantized_matmul/simd/int_plain_strip.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

// The vectors of sums of a block, for all rows of x.
template <class Format, int kPieces, int kRows>
inline constexpr int kBlockSums = kRows * kPieces * RowBytes<Format>::kVectors;

// True if a block is a cache line and registers are left for a second vector of factors per piece.
template <class Format, int kPieces, int kRows>
inline constexpr bool kSkips = kBlockSums<Format, kPieces, kRows> <= 16 &&
                               RowBytes<Format>::kWhole && RowBytes<Format>::kBlockBytes == 64;

// For several rows of x: stores the interleaved bytes of a band, then multiplies a few vectors of
// columns at a time, each within one group.
template <class Format, int kPieces, int kRows>
class BufferedGemv final : public IntPlainStrip<BufferedGemv<Format, kPieces, kRows>,
                                                Format,
                                                kPieces,
                                                kRows,
                                                false,
                                                false> {
  using Strip =
      IntPlainStrip<BufferedGemv<Format, kPieces, kRows>, Format, kPieces, kRows, false, false>;
  using Codes = RowBytes<Format>;

 public:
  using Strip::Strip;

  template <bool kWhole>
  void multiply_block(int64_t n, int64_t rows, int64_t block) {
    interleave<kWhole>(n, rows, args_.first_block + block);
    constexpr int kStep = kAtOnce < Codes::kPerWord ? Codes::kPerWord : kAtOnce;
    for (int vector = 0; vector < kVectors; vector += kStep) {
      unroll<kStep / kAtOnce>(
          [&](auto part) { multiply<part.value * kAtOnce>(block, vector, (rows + 3) / 4); });
    }
  }

 private:
  using Strip::args_;
  using Strip::at;
  using Strip::column_of_factors;
  using Strip::first_byte;
  using Strip::group_shift_;
  using Strip::kVectors;
  using Strip::prefetch_some;
  using Strip::row_bytes_;
  // Vectors of columns whose sums fit in registers together.
  static constexpr int kAtOnce = kRows * kPieces <= 4 ? 4 : kRows * kPieces <= 8 ? 2 : 1;

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
        this->add_sums(block, first + v.value, m.value, sums[v.value] + m.value * kPieces,
                       this->factors_[0].sum(m.value, groups[v.value]),
                       this->factors_[0].exponent(m.value, groups[v.value]),
                       this->factors_[0].shift(m.value, groups[v.value]));
      });
    });
  }

  MLX_ANVIL_UNROLLED void add_products(i32v (&sums)[kRows * kPieces],
                                       u32v codes,
                                       int64_t group,
                                       int64_t quad) const {
    unroll<kRows * kPieces>([&](auto s) __attribute__((always_inline)) {
      i32v& sum = sums[s.value];
      sum = with_products(
          sum, codes, this->factors_[0].word(group, quad, s.value / kPieces, s.value % kPieces));
    });
  }

  // Interleaved bytes of four rows, not yet split into codes: 4-bit codes then take half the
  // stores.
  alignas(64) u32v packed_[kQuads][4];
};

// For few sums, which stay in registers for a whole block: multiplies bytes as soon as they are
// interleaved, by quarters, which may span groups.
template <class Format, int kPieces, int kRows>
class DirectGemv final : public IntPlainStrip<DirectGemv<Format, kPieces, kRows>,
                                              Format,
                                              kPieces,
                                              kRows,
                                              true,
                                              kSkips<Format, kPieces, kRows>> {
  using Strip = IntPlainStrip<DirectGemv<Format, kPieces, kRows>,
                              Format,
                              kPieces,
                              kRows,
                              true,
                              kSkips<Format, kPieces, kRows>>;
  using Codes = RowBytes<Format>;
  using Factors = typename Strip::Factors;

 public:
  using Strip::Strip;

  template <bool kWhole>
  void multiply_block(int64_t n, int64_t rows, int64_t block) {
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
      auto of_groups = of_factors(this->factors_[now_]);
      using Vector = decltype(of_groups);
      if constexpr (kSkips<Format, kPieces, kRows> && !kWhole) {
        of_groups = bits_as<Vector>(
            _mm512_mask_mov_epi32(bits_as<__m512i>(of_groups), lanes_before,
                                  bits_as<__m512i>(of_factors(this->factors_[1 - now_]))));
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
        this->add_sums(block, v.value, m.value, sums[v.value] + m.value * kPieces, sum[kPart],
                       exponent[kPart], shift[kPart]);
      });
    });
  }

 private:
  using Strip::args_;
  using Strip::at;
  using Strip::column_of_factors;
  using Strip::first_byte;
  using Strip::group_shift_;
  using Strip::kVectors;
  using Strip::now_;
  using Strip::prefetch_some;
  using Strip::row_bytes_;
  // Parts of a block's quarters, each within one group.
  static constexpr int kParts =
      kSkips<Format, kPieces, kRows> || std::is_same_v<Format, IntNvfp4> ? 2 : 1;
};

template <class Format, int kPieces, int kRows>
using IntPlainGemv = std::conditional_t<kBlockSums<Format, kPieces, kRows> <= 24,
                                        DirectGemv<Format, kPieces, kRows>,
                                        BufferedGemv<Format, kPieces, kRows>>;

// Calls action(type_identity of the kernel class) for the format, dtype and number of rows.
template <class Action>
void with_kernel(const QuantizedMatrixView& matrix, int64_t x_rows, Action action) {
  if (matrix.format.kind == QuantizedKind::kNvfp4) {  // one row of x
    return matrix.dtype == KernelDtype::kFloat32
               ? action(std::type_identity<DirectGemv<IntNvfp4, 3, 1>>())
               : action(std::type_identity<DirectGemv<IntNvfp4, 2, 1>>());
  }
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

int64_t quantized_int_plain_columns(const QuantizedMatrixView& matrix, int64_t x_rows) {
  int64_t columns = 0;
  if (matrix.format.kind != QuantizedKind::kMxfp8) {
    with_int_format(matrix.format, [&](auto format) {
      using Codes = RowBytes<decltype(format)>;
      // The columns of a vector must share a group. Only DirectGemv halves a vector.
      const bool one_group = matrix.format.group >= kLanes * Codes::kPerWord;
      const bool halves = matrix.format.kind == QuantizedKind::kNvfp4 && x_rows == 1;
      columns = one_group || halves ? Codes::kColumns : 0;
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

int64_t quantized_int_plain_columns(const QuantizedMatrixView&, int64_t) {
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

// The products of cpu_plain_gemv.cpp in integers, where the machine has byte products:
//
//   sum over n of x[n] scale[n, g] code[n, k] ~= step[g] * (sum over n of X[n, g] code[n, k])
//
// for a band of rows n at a time, X as in cpu_int_gemv.cpp. A lane is a column and has the codes of
// four rows, whose bytes are interleaved. A band is unpacked once for all rows of x.
#include "quantized_matmul/cpu_entries.h"
#if defined(__AVX512VNNI__)
#include "quantized_matmul/cpu_int_factors.h"
#include "quantized_matmul/cpu_int_interleave.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

// Adds to each lane of `sum` its four codes times the four signed bytes of x. In one instruction,
// which compilers make two of: they would load many words of x at once, for want of registers into
// memory again.
inline i32v with_products(i32v sum, u32v codes, const int32_t& x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(x));
  return sum;
}

inline i32v with_products(i32v sum, u32v codes, u32v x) {
  return bits_as<i32v>(
      _mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(codes), bits_as<__m512i>(x)));
}

// The sums of all pieces together, over at most kCount bytes, less `offset` times the sum of X.
template <class Format, int kCount, int kPieces, class Sum>
inline f32v in_floats(const i32v (&sums)[kPieces], int32_t offset, Sum sum_of_x) {
  constexpr int64_t kMost = int64_t{Format::kLargest} * kCount << (8 * kPieces - 1);
  if constexpr (kMost <= int64_t{1} << 31) {
    i32v sum = sums[kPieces - 1];
    for (int p = kPieces - 2; p >= 0; --p) {
      sum = (sum << 8) + sums[p];
    }
    return __builtin_convertvector(sum - offset * sum_of_x, f32v);
  } else {
    i32v high = sums[kPieces - 1];
    for (int p = kPieces - 2; p > 0; --p) {
      high = (high << 8) + sums[p];
    }
    high -= offset * (sum_of_x >> 8);
    const i32v low = sums[0] - offset * (sum_of_x & 0xff);
    return __builtin_convertvector(high, f32v) * 256.0f + __builtin_convertvector(low, f32v);
  }
}

template <class Format, int kPieces, int kRows>
class IntPlainGemv {
 public:
  explicit IntPlainGemv(const QuantizedPlainGemvArgs& args)
      : args_(args),
        row_bytes_(args.matrix.columns * Format::kBits / 8),
        group_shift_(__builtin_ctz(static_cast<unsigned>(args.matrix.format.group))),
        factors_(args, Format::kOffset) {}

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
        if (block % blocks_at_once() == 0) {
          first_group_ = (args_.first_block + block) * Codes::kColumns >> group_shift_;
          if (!factors_.read(n, rows, first_group_)) {
            return false;
          }
        }
        if constexpr (kDirect) {
          const int64_t left = row_bytes_ - (args_.first_block + block) * Codes::kBlockBytes;
          if (left >= Codes::kBlockBytes) {
            multiply_directly<true>(n, rows, block);
          } else {
            multiply_directly<false>(n, rows, block);
          }
        } else {
          interleave(n, rows, args_.first_block + block);
          constexpr int kStep = kAtOnce < Codes::kPerWord ? Codes::kPerWord : kAtOnce;
          for (int vector = 0; vector < kVectors; vector += kStep) {
            unroll<kStep / kAtOnce>(
                [&](auto part) { multiply<part.value * kAtOnce>(block, vector, (rows + 3) / 4); });
          }
        }
      }
    }
    finish();
    return true;
  }

 private:
  using Codes = RowBytes<Format>;
  static constexpr int kVectors = Codes::kVectors;
  // Whether registers hold the sums of a whole block, beside what interleaving takes: then bytes
  // are multiplied as soon as they are interleaved, by quarters, which may be of several groups.
  // Else they are stored, for some vectors after others, each of one group.
  static constexpr bool kDirect = kRows * kPieces * kVectors <= 24;
  using Factors = BandFactors<kPieces, kRows, kDirect>;
  // Vectors of columns whose sums registers hold at once.
  static constexpr int kAtOnce = kRows * kPieces <= 4 ? 4 : kRows * kPieces <= 8 ? 2 : 1;

  int64_t row_step() const { return args_.blocks * Codes::kColumns; }

  // Blocks whose groups are a vector's lanes.
  int64_t blocks_at_once() const { return (int64_t{kLanes} << group_shift_) / Codes::kColumns; }

  const char* at(int64_t n, int64_t block) const {
    return reinterpret_cast<const char*>(args_.matrix.weights.w) + (args_.first + n) * row_bytes_ +
           block * Codes::kBlockBytes;
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

  void interleave(int64_t n, int64_t rows, int64_t block) {
    const __mmask64 in_row = Codes::in_row(row_bytes_ - block * Codes::kBlockBytes);
    const char* w = at(n, block);
    for (int quad = 0; quad < kQuads && 4 * quad < rows; ++quad, w += 4 * row_bytes_) {
      prefetch_some();
      interleave_quad<Codes>(w, row_bytes_, rows - 4 * quad, in_row, packed_[quad]);
    }
  }

  // The lane of its group. Beyond a row's last column any will do.
  int64_t group_of(int64_t block, int vector) const {
    const int64_t first_column =
        (args_.first_block + block) * Codes::kColumns + Codes::column(vector);
    const int64_t group = (first_column >> group_shift_) - first_group_;
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
                 factors_.sum(m.value, groups[v.value]),
                 factors_.exponent(m.value, groups[v.value]),
                 factors_.shift(m.value, groups[v.value]));
      });
    });
  }

  // Both at once, for a block.
  template <bool kInRow>
  void multiply_directly(int64_t n, int64_t rows, int64_t block) {
    const int64_t in_matrix = args_.first_block + block;
    const __mmask64 in_row = Codes::in_row(row_bytes_ - in_matrix * Codes::kBlockBytes);
    const char* w = at(n, in_matrix);
    u32v column;
    for (int lane = 0; lane < kLanes; ++lane) {
      column[lane] = static_cast<uint32_t>(Codes::column_by_quarters(0, lane));
    }
    const u32v groups = (column + static_cast<uint32_t>(in_matrix * Codes::kColumns -
                                                        (first_group_ << group_shift_))) >>
                        group_shift_;
    const auto of_lanes = [groups](auto of_groups) __attribute__((always_inline)) {
      return bits_as<decltype(of_groups)>(lookup(bits_as<f32v>(of_groups), groups));
    };
    i32v sums[kVectors][kRows * kPieces] = {};
    for (int64_t quad = 0; 4 * quad < rows; ++quad, w += 4 * row_bytes_) {
      prefetch_some();
      u32v bytes[4], x[kRows * kPieces];
      interleave_quarters<Codes, kInRow>(w, row_bytes_, rows - 4 * quad, in_row, bytes);
      unroll<kRows * kPieces>([&](auto s) __attribute__((always_inline)) {
        x[s.value] = of_lanes(factors_.words(quad, s.value / kPieces, s.value % kPieces));
      });
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        constexpr int kPart = v.value / Codes::kPerWord;
        const u32v codes = Codes::template nested<v.value % Codes::kPerWord>(bytes[kPart]);
        unroll<kRows * kPieces>([&](auto s) __attribute__((always_inline)) {
          sums[v.value][s.value] = with_products(sums[v.value][s.value], codes, x[s.value]);
        });
      });
    }
    Codes::unnest(sums);
    unroll<kRows>([&](auto m) __attribute__((always_inline)) {
      const i32v sum = of_lanes(factors_.sums(m.value));
      const f32v exponent = of_lanes(factors_.exponents(m.value));
      const f32v shift = of_lanes(factors_.shifts(m.value));
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        add_sums(block, v.value, m.value, sums[v.value] + m.value * kPieces, sum, exponent, shift);
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
                          factors_.word(group, quad, s.value / kPieces, s.value % kPieces));
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

  // Vectors of a block to the order of columns.
  void finish() {
    if constexpr (kDirect) {
      for (int64_t i = 0; i < kRows * row_step(); i += Codes::kColumns) {
        float vectors[Codes::kColumns];
        std::memcpy(vectors, args_.out + i, sizeof(vectors));
        Codes::store_quarters_in_order(vectors, args_.out + i);
      }
      return;
    }
    for (int64_t i = 0; i < kRows * row_step(); i += kPlainPanel) {
      float vectors[kPlainPanel];
      std::memcpy(vectors, args_.out + i, sizeof(vectors));
      Codes::store_in_order(vectors, args_.out + i);
    }
  }

  const QuantizedPlainGemvArgs& args_;
  const int64_t row_bytes_;
  const int group_shift_;
  int64_t first_group_ = 0;  // of the factors
  Factors factors_;
  const char* ahead_ = nullptr;  // a row of the next band
  int64_t ahead_bytes_ = 0;
  // Bytes of four rows side by side, before they are taken apart into codes: half as much to store
  // of 4 bits.
  alignas(64) u32v packed_[kQuads][4];
};

template <class Format, int kPieces>
bool multiply_rows(const QuantizedPlainGemvArgs& args) {
  switch (args.x_rows) {
    case 1:
      return IntPlainGemv<Format, kPieces, 1>(args).run();
    case 2:
      return IntPlainGemv<Format, kPieces, 2>(args).run();
    case 4:
      return IntPlainGemv<Format, kPieces, 4>(args).run();
    default:
      return IntPlainGemv<Format, kPieces, 8>(args).run();
  }
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

bool quantized_int_plain_gemv(const QuantizedPlainGemvArgs& args) {
  bool finite = false;
  with_int_format(args.matrix.format, [&](auto format) {
    using Format = decltype(format);
    // Three bytes of each product for float32, two for the 16-bit dtypes.
    finite = args.matrix.dtype == QuantizedDtype::kFloat32 ? multiply_rows<Format, 3>(args)
                                                           : multiply_rows<Format, 2>(args);
  });
  return finite;
}

#else

int64_t quantized_int_plain_columns(const QuantizedMatrixView&) {
  return 0;
}
bool quantized_int_plain_gemv(const QuantizedPlainGemvArgs&) {
  return false;
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

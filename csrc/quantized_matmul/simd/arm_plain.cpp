// The plain product of up to 8 rows in integers, on 64-bit Arm: the sums of int_plain_gemv.cpp,
// with sdot. A lane is a column and has the codes of four rows of w.
//
//   for each band of rows of w: for each kColumnsAtOnce columns:
//     X = x * scale as bytes, for the groups of these and the next columns        (BandFactors)
//     unpack the codes and interleave those of four rows
//     for each row of x: for each run of columns:
//       out += (sum of codes * X) * 2^exponent + shift
#include "quantized_matmul/simd/entries.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "quantized_matmul/simd/arm_rows.h"
#include "quantized_matmul/simd/int_factors.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__ARM_FEATURE_DOTPROD)

namespace {

// Unpacked at once, if they span no more groups than BandFactors has: whole cache lines of w,
// because L1 may have evicted a line by the time of the next columns. Rows of w lie a power of two
// apart.
constexpr int64_t kColumnsAtOnce = 128;

// A block is a run of columns.
template <class Format, int kPieces, int kRows>
class ArmPlain {
 public:
  explicit ArmPlain(const QuantizedPlainGemvArgs& args)
      : args_(args),
        row_bytes_(args.matrix.columns / Format::kColumns * kRunBytes),
        blocks_of_group_(args.matrix.format.group / Format::kColumns) {}

  // Returns false if a value is not finite.
  bool run() {
    std::memset(args_.out, 0, kRows * args_.blocks * Format::kColumns * sizeof(float));
    const int64_t of_factors = kLanes * blocks_of_group_;
    const int64_t most = kColumnsAtOnce / Format::kColumns;
    const int64_t at_once = most < of_factors ? most : of_factors;
    for (int64_t n = 0; n < args_.count; n += kBandRows) {
      const int64_t rows = args_.count - n < kBandRows ? args_.count - n : kBandRows;
      for (int64_t block = 0; block < args_.blocks; block += at_once) {
        const int64_t group = (args_.first_block + block) / blocks_of_group_;
        if (block % of_factors == 0 && !factors_.read(args_, n, rows, group, Format::kOffset)) {
          return false;
        }
        const int64_t left = args_.blocks - block, blocks = left < at_once ? left : at_once;
        interleave(n, rows, block, blocks);
        for (int m = 0; m < kRows; ++m) {
          for (int64_t b = 0; b < blocks; ++b) {
            multiply(m, (rows + 3) / 4, block + b, b);
          }
        }
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kRunBytes = Format::kColumns * Format::kBits / 8;
  static constexpr int kVectors = Format::kColumns / kLanes;  // of a block

  void interleave(int64_t n, int64_t rows, int64_t block, int64_t blocks) {
    const auto* const first = reinterpret_cast<const uint8_t*>(args_.matrix.weights.w) +
                              (args_.first + n) * row_bytes_ +
                              (args_.first_block + block) * kRunBytes;
    for (int64_t quad = 0; 4 * quad < rows; ++quad) {
      const uint8_t* w[4];
      for (int i = 0; i < 4; ++i) {
        // Past the last row of w, repeat it: X is 0 there.
        const int64_t row = 4 * quad + i;
        w[i] = first + (row < rows ? row : rows - 1) * row_bytes_;
      }
      for (int64_t b = 0; b < blocks; ++b) {
        int8x16_t codes[4][Format::kVectors];
        for (int i = 0; i < 4; ++i) {
          uint8x16_t raw[Format::kRaw];
          Format::load(w[i] + b * kRunBytes, raw);
          Format::codes(raw, codes[i]);
        }
        int8x16_t* const to = codes_[b][quad];
        for (int v = 0; v < Format::kVectors; ++v) {
          const int8x16x2_t even = vzipq_s8(codes[0][v], codes[2][v]);
          const int8x16x2_t odd = vzipq_s8(codes[1][v], codes[3][v]);
          const int8x16x2_t low = vzipq_s8(even.val[0], odd.val[0]);
          const int8x16x2_t high = vzipq_s8(even.val[1], odd.val[1]);
          to[4 * v] = low.val[0];
          to[4 * v + 1] = low.val[1];
          to[4 * v + 2] = high.val[0];
          to[4 * v + 3] = high.val[1];
        }
      }
    }
  }

  // Adds the products of row m of x and a block, the b-th of those interleaved.
  void multiply(int m, int64_t quads, int64_t block, int64_t b) {
    const int64_t group = block / blocks_of_group_ % kLanes;
    int32x4_t sums[kVectors][kPieces] = {};
    for (int64_t quad = 0; quad < quads; ++quad) {
      int8x16_t x[kPieces];
      for (int piece = 0; piece < kPieces; ++piece) {
        x[piece] = vreinterpretq_s8_s32(vld1q_dup_s32(&factors_.word(group, quad, m, piece)));
      }
      const int8x16_t* const codes = codes_[b][quad];
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        for (int piece = 0; piece < kPieces; ++piece) {
          int32x4_t& sum = sums[v.value][piece];
          sum = vdotq_s32(sum, codes[v.value], x[piece]);
        }
      });
    }
    const f32v exponent = splat(factors_.exponent(m, group));
    const f32v shift = splat(factors_.shift(m, group));
    float* const out = args_.out + (m * args_.blocks + block) * Format::kColumns;
    unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      const f32v sum = bits_as<f32v>(combined<kPieces>(sums[v.value]));
      const f32v product = times_power(sum, exponent) * (Format::kFactor / Factors::kScale);
      float* const total = out + v.value * kLanes;
      store_lanes(total, load_lanes(total) + (product + shift));
    });
  }

  using Factors = BandFactors<kPieces, kRows, false>;

  const QuantizedPlainGemvArgs& args_;
  const int64_t row_bytes_, blocks_of_group_;
  Factors factors_;
  int8x16_t codes_[kColumnsAtOnce / Format::kColumns][kQuads][kVectors];
};

template <class Format>
void put_in_order(float* row, int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block, row += Format::kColumns) {
    float vectors[Format::kColumns];
    std::memcpy(vectors, row, sizeof(vectors));
    for (int i = 0; i < Format::kColumns; ++i) {
      row[Format::column(i / 16, i % 16)] = vectors[i];
    }
  }
}

template <class Format, int kPieces>
bool multiply_rows(const QuantizedPlainGemvArgs& args) {
  switch (args.x_rows) {
    case 1:
      return ArmPlain<Format, kPieces, 1>(args).run();
    case 2:
      return ArmPlain<Format, kPieces, 2>(args).run();
    case 4:
      return ArmPlain<Format, kPieces, 4>(args).run();
    default:
      return ArmPlain<Format, kPieces, 8>(args).run();
  }
}

}  // namespace

int64_t quantized_int_plain_columns(const QuantizedMatrixView& matrix, int64_t) {
  int64_t columns = 0;
  if (matrix.format.kind != QuantizedKind::kMxfp8) {
    with_arm_format(matrix.format, [&](auto format) { columns = decltype(format)::kColumns; });
  }
  return columns;
}

int64_t quantized_int_plain_skipped(const QuantizedMatrixView&, int64_t) {
  return 0;
}

void quantized_int_plain_order(const QuantizedMatrixView& matrix,
                               int64_t,
                               int64_t blocks,
                               float* row) {
  with_arm_format(matrix.format, [&](auto format) { put_in_order<decltype(format)>(row, blocks); });
}

bool quantized_int_plain_gemv(const QuantizedPlainGemvArgs& args) {
  bool finite = false;
  with_arm_format(args.matrix.format, [&](auto format) {
    with_pieces(args.matrix.dtype,
                [&](auto pieces) { finite = multiply_rows<decltype(format), pieces.value>(args); });
  });
  return finite;
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

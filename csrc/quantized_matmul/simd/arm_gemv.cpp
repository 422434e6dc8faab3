// Integer GEMV on 64-bit Arm: the products of int_gemv.cpp with sdot, or smmla where there is one.
// Several rows of x take the loops of arm_panels.h. One row of x multiplies codes as soon as they
// are unpacked:
//
//   for each four rows of w: read their scales; for each unit of columns:
//     sums = sum of codes * X for each piece; totals += sums * step * scale
//     at the end of a group: totals += shift * (sum of x)
#include "quantized_matmul/simd/entries.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "quantized_matmul/simd/arm_panels.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__ARM_FEATURE_DOTPROD)

namespace {

constexpr int kQuad = 4;  // rows of w

// Sums of one row of x and four rows of w.
template <class Format, int kPieces>
class OneRowSums {
 public:
  // Adds a run of columns.
  MLX_ANVIL_UNROLLED void add(const uint8_t* const (&w)[kQuad], const char* x) {
    uint8x16_t raw[kQuad][Format::kRaw];
    for (int i = 0; i < kQuad; ++i) {
      Format::load(w[i], raw[i]);
    }
    if constexpr (Layout::kPaired) {
      add_pairs(raw, x);
    } else {
      for (int i = 0; i < kQuad; ++i) {
        int8x16_t codes[Format::kVectors];
        Format::codes(raw[i], codes);
        for (int v = 0; v < Format::kVectors; ++v) {
          for (int piece = 0; piece < kPieces; ++piece) {
            const auto bytes = load_bits<int8x16_t>(x + v * Layout::kVectorBytes + piece * 16);
            sums_[piece][i] = vdotq_s32(sums_[piece][i], codes[v], bytes);
          }
        }
      }
    }
  }

  // The sum of each row of w, per piece.
  MLX_ANVIL_UNROLLED void get(int32x4_t (&sums)[kPieces]) const {
    for (int piece = 0; piece < kPieces; ++piece) {
      if constexpr (Layout::kPaired) {
        const int32x4_t* const of = sums_[piece / 2];
        sums[piece] = piece % 2 == 0 ? vuzp1q_s32(of[0], of[1]) : vuzp2q_s32(of[0], of[1]);
      } else {
        const int32x4_t* const of = sums_[piece];
        sums[piece] = vpaddq_s32(vpaddq_s32(of[0], of[1]), vpaddq_s32(of[2], of[3]));
      }
    }
  }

 private:
  using Layout = ArmRowLayout<kPieces>;

  MLX_ANVIL_UNROLLED void add_pairs(const uint8x16_t (&raw)[kQuad][Format::kRaw], const char* x) {
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      unroll<kQuad / 2>([&](auto pair) __attribute__((always_inline)) {
        uint8x16_t halves[Format::kRaw];
        for (int i = 0; i < Format::kRaw; ++i) {
          const uint64x2_t a = vreinterpretq_u64_u8(raw[2 * pair.value][i]);
          const uint64x2_t b = vreinterpretq_u64_u8(raw[2 * pair.value + 1][i]);
          halves[i] = vreinterpretq_u8_u64(half.value == 0 ? vzip1q_u64(a, b) : vzip2q_u64(a, b));
        }
        int8x16_t codes[Format::kVectors];
        Format::codes(halves, codes);
        for (int v = 0; v < Format::kVectors; ++v) {
          for (int line = 0; line < Layout::kPairs; ++line) {
            const auto lines = load_bits<int8x16_t>(x + v * Layout::kVectorBytes +
                                                    (half.value * Layout::kPairs + line) * 16);
            int32x4_t& sum = sums_[line][pair.value];
            sum = squares(sum, codes[v], lines);
          }
        }
      });
    });
  }

  // smmla: a 2x2 square of two rows of w and two pieces.
  int32x4_t sums_[Layout::kPaired ? Layout::kPairs : kPieces][Layout::kPaired ? 2 : kQuad] = {};
};

template <class Format, int kPieces>
void multiply_one(const QuantizedGemvArgs& args) {
  const QuantizedMatrixView& matrix = args.matrix;
  const ArmRowLayout<kPieces> layout(matrix);
  const GroupScales<kQuad> scales(args.scratch);
  const char* const row = reinterpret_cast<const char*>(args.x);
  const int64_t groups = layout.columns / layout.group;
  const int64_t units_of_group = layout.group / layout.unit;
  const int64_t runs_of_unit = layout.unit / Format::kColumns;
  constexpr int64_t kRunBytes = Format::kColumns * Format::kBits / 8;
  const int64_t row_bytes = layout.columns / Format::kColumns * kRunBytes;
  for (int64_t n = 0; n < args.count; n += kQuad) {
    const int64_t left = args.count - n, rows = left < kQuad ? left : kQuad;
    scales.template read<Format>(matrix, args.first + n, rows, 0, groups);
    const uint8_t* w[kQuad];
    for (int i = 0; i < kQuad; ++i) {
      // Past the last row of w, repeat it.
      w[i] = reinterpret_cast<const uint8_t*>(matrix.weights.w) +
             (args.first + n + (i < rows ? i : rows - 1)) * row_bytes;
    }
    const char* x = row;
    const float *step = layout.steps(row), *sum_of_x = layout.sums(row);
    const float* factors = scales.of_group(0);
    float32x4_t totals = vdupq_n_f32(0.0f);
    for (int64_t group = 0; group < groups; ++group) {
      const float32x4_t of_codes = vld1q_f32(factors), of_sum = vld1q_f32(factors + kQuad);
      factors += GroupScales<kQuad>::kFloatsOfGroup;
      for (int64_t unit = 0; unit < units_of_group; ++unit) {
        OneRowSums<Format, kPieces> of_unit;
        for (int64_t run = 0; run < runs_of_unit; ++run) {
          of_unit.add(w, x);
          x += Format::kVectors * ArmRowLayout<kPieces>::kVectorBytes;
          for (int i = 0; i < kQuad; ++i) {
            w[i] += kRunBytes;
          }
        }
        int32x4_t sums[kPieces];
        of_unit.get(sums);
        totals = add_unit<kPieces>(totals, sums, *step++, of_codes);
      }
      if constexpr (Format::kHasBiases) {
        totals = vfmaq_n_f32(totals, of_sum, *sum_of_x++);
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      args.out[n + i] = totals[i] * Format::kFactor;
    }
  }
}

template <class Format, int kPieces>
void multiply_rows(const QuantizedGemvArgs& args) {
  const char* const x = reinterpret_cast<const char*>(args.x);
  ArmPanel<Format, kPieces> panel(args.matrix, reinterpret_cast<char*>(args.scratch));
  for (int64_t n = 0; n < args.count; n += kArmPanel) {
    const int64_t left = args.count - n, rows = left < kArmPanel ? left : kArmPanel;
    panel.multiply(args.first + n, rows, x, args.x_rows);
    for (int64_t m = 0; m < args.x_rows; ++m) {
      for (int64_t i = 0; i < rows; ++i) {
        args.out[m * args.count + n + i] = panel.totals()[m * kArmPanel + i] * Format::kFactor;
      }
    }
  }
}

}  // namespace

int64_t quantized_int_row_bytes(const QuantizedMatrixView& matrix) {
  int64_t bytes = 0;
  if (matrix.format.kind != QuantizedKind::kMxfp8) {
    with_pieces(matrix, [&](auto pieces) { bytes = ArmRowLayout<pieces.value>(matrix).bytes(); });
  }
  return bytes;
}

bool quantized_int_pack(const QuantizedMatrixView& matrix, const float* x, void* to) {
  bool finite = false;
  with_arm_format(matrix.format, [&](auto format) {
    with_pieces(matrix, [&](auto pieces) {
      finite = pack_arm_row<decltype(format), pieces.value>(matrix, x, static_cast<char*>(to));
    });
  });
  return finite;
}

void quantized_int_gemv(const QuantizedGemvArgs& args) {
  with_arm_format(args.matrix.format, [&](auto format) {
    with_pieces(args.matrix, [&](auto pieces) {
      using Format = decltype(format);
      args.x_rows == 1 ? multiply_one<Format, pieces.value>(args)
                       : multiply_rows<Format, pieces.value>(args);
    });
  });
}

int64_t quantized_int_gemv_scratch(const QuantizedMatrixView& matrix) {
  const int64_t of_one = padded(matrix.columns / matrix.format.group) * 2 * kQuad;
  const int64_t of_rows =
      ArmPanel<ArmMxfp4, 2>::scratch(kQuantizedGemvRows) / static_cast<int64_t>(sizeof(float));
  return of_one > of_rows ? of_one : of_rows;
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// Rows of x as signed bytes, for the integer products of 64-bit Arm. For kernel files only, and
// only on machines with sdot.
//   x ~= step * X,  X = X0 + 256 X1 (+ 65536 X2), each X_i a signed byte
// There is one step per unit of columns: a group, or with one byte at most 32 columns of it.
#pragma once

#include "quantized_matmul/simd/arm_codes.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Adds the products of two rows of 8 bytes, `a`, and two rows of 8 bytes, `b`.
#if defined(__ARM_FEATURE_MATMUL_INT8)
inline constexpr bool kHasSquares = true;
inline int32x4_t squares(int32x4_t sum, int8x16_t a, int8x16_t b) {
  return vmmlaq_s32(sum, a, b);
}
#else
inline constexpr bool kHasSquares = false;
int32x4_t squares(int32x4_t sum, int8x16_t a, int8x16_t b);  // not defined
#endif

// Layout of a packed row of x: the bytes of every 16 columns of w's order, the step of each unit,
// and for affine formats the sum of X times its step for each group.
//
// 16 columns have, for sdot, 16 bytes of each piece. For smmla each half of them has pairs of
// pieces, 8 bytes of one and 8 of the other; the third piece is paired with zeros. A single piece
// is not paired: smmla takes those of two rows.
template <int kPieces>
struct ArmRowLayout {
  static constexpr bool kPaired = kHasSquares && kPieces > 1;
  static constexpr int kPairs = (kPieces + 1) / 2;
  static constexpr int kVectorBytes = kPaired ? 2 * kPairs * 16 : kPieces * 16;

  int64_t columns, group, unit;

  explicit ArmRowLayout(const QuantizedMatrixView& matrix)
      : columns(matrix.columns),
        group(matrix.format.group),
        unit(kPieces == 1 && group > 32 ? 32 : group) {}

  int64_t vectors_at(int64_t column) const { return column / 16 * kVectorBytes; }
  int64_t steps_at() const { return vectors_at(columns); }
  int64_t sums_at() const { return steps_at() + columns / unit * sizeof(float); }
  int64_t bytes() const {
    const int64_t end = sums_at() + columns / group * static_cast<int64_t>(sizeof(float));
    return (end + 63) / 64 * 64;
  }

  const float* steps(const char* row) const {
    return reinterpret_cast<const float*>(row + steps_at());
  }
  const float* sums(const char* row) const {
    return reinterpret_cast<const float*>(row + sums_at());
  }

  // Where 16 columns have byte `byte` of a piece.
  static constexpr int place(int byte, int piece) {
    return kPaired ? (byte / 8 * kPairs + piece / 2) * 16 + piece % 2 * 8 + byte % 8
                   : piece * 16 + byte;
  }
};

// Packs a row of x. Returns false if an element is not finite; `to` is then undefined.
template <class Format, int kPieces, class T>
bool pack_arm_row(const QuantizedMatrixView& matrix, const T* x, char* to) {
  const ArmRowLayout<kPieces> layout(matrix);
  // A byte with its top bit set is 256 less as a signed byte, so the byte above it must be one
  // more.
  constexpr uint32_t kCarry = kPieces == 1 ? 0u : kPieces == 2 ? 0x80u : 0x8080u;
  float* const steps = reinterpret_cast<float*>(to + layout.steps_at());
  float* const sums = reinterpret_cast<float*>(to + layout.sums_at());
  std::memset(to, 0, layout.bytes());
  IntUnit<kPieces> unit;
  for (int64_t column = 0; column < layout.columns; column += layout.unit) {
    if (!unit.round(x + column, layout.unit)) {
      return false;
    }
    for (int64_t first = 0; first < layout.unit; first += Format::kColumns) {
      for (int i = 0; i < Format::kVectors; ++i) {
        char* const bytes = to + layout.vectors_at(column + first + 16 * i);
        for (int b = 0; b < 16; ++b) {
          const auto whole = static_cast<uint32_t>(unit[first + Format::column(i, b)]);
          const uint32_t integer = (whole + kCarry) ^ kCarry;
          for (int piece = 0; piece < kPieces; ++piece) {
            bytes[layout.place(b, piece)] = static_cast<char>(integer >> (8 * piece));
          }
        }
      }
    }
    steps[column / layout.unit] = unit.step();
    if constexpr (Format::kHasBiases) {
      // Biases multiply the rounded x, as in int_rows.h.
      sums[column / layout.group] += static_cast<float>(unit.sum()) * unit.step();
    }
  }
  return true;
}

// ---- sums ---------------------------------------------------------------------------------------

// Combines the sums of all pieces, over at most 128 columns.
template <int kPieces>
MLX_ANVIL_UNROLLED float32x4_t combined(const int32x4_t (&sums)[kPieces]) {
  if constexpr (kPieces == 1) {
    return vcvtq_f32_s32(sums[0]);
  } else if constexpr (kPieces == 2) {
    return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(sums[1], 8), sums[0]));
  } else {
    const int32x4_t high = vaddq_s32(vshlq_n_s32(sums[2], 8), sums[1]);
    return vfmaq_n_f32(vcvtq_f32_s32(sums[0]), vcvtq_f32_s32(high), 256.0f);
  }
}

// Adds a unit's sums of four rows of w to their totals. The order matters: a small scale times the
// step could be subnormal.
template <int kPieces>
MLX_ANVIL_UNROLLED float32x4_t
add_unit(float32x4_t totals, const int32x4_t (&sums)[kPieces], float step, float32x4_t scales) {
  return vfmaq_f32(totals, vmulq_n_f32(combined<kPieces>(sums), step), scales);
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// Integer products of several rows of x on 64-bit Arm. For kernel files only, and only on machines
// with sdot. Panels of w are unpacked to bytes, which stay in L1 for all rows of x. Integer sums
// are exact and floats are added in the order of arm_gemv.cpp's loop for one row, so that a row of
// x has the same bits whatever the number of rows.
//
//   for each panel of kArmPanel rows of w: for each chunk of columns:
//     unpack the codes; read the scales
//     for each tile of rows of x: for each strip of the panel: for each unit of columns:
//       sums = sum of codes * X for each piece                        (smmla or sdot)
//       totals += sums * step * scale
//       at the end of a group: totals += shift * (sum of x)
//
// A strip's bytes, for every 16 columns:
//   smmla: [half][pair of rows], 8 bytes of each of two rows
//   sdot:  [word][quad of rows], 4 bytes of each of four rows
#pragma once

#include "quantized_matmul/simd/arm_rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

constexpr int kArmStrip = 8, kArmPanel = 32;  // rows of w
constexpr int64_t kArmChunk = 256;            // columns, a multiple of every group
constexpr int kArmStripBytes = kArmStrip * 16;

// Rows of x per tile: sums take half the registers, or less.
template <int kPieces>
inline constexpr int kArmTileRows = kPieces == 3 ? 2 : 4;

// A strip of w, a tile of rows of x, and a chunk of columns.
struct ArmTile {
  const char* x;  // of the chunk
  int64_t x_step;
  const float* steps;  // likewise
  const float* sums;
  const int8_t* codes;
  const float* scales;  // of the strip, as GroupScales<kArmPanel> has them
  float* totals;        // [rows][kArmPanel]
  int64_t groups, units_of_group, vectors_of_unit;
};

template <int kPieces, int kRows>
struct ArmSums {
  static constexpr int kVectorBytes = ArmRowLayout<kPieces>::kVectorBytes;
  // Adds 16 columns, of which x has the bytes of the first row.
  MLX_ANVIL_UNROLLED void add(const int8_t* codes, const char* x, int64_t x_step);
  // The sums of row m of x and of the strip's rows from 4 * quad on.
  MLX_ANVIL_UNROLLED void get(int m, int quad, int32x4_t (&sums)[kPieces]) const;

#if defined(__ARM_FEATURE_MATMUL_INT8)
  // Pairs of lines of bytes: those of a row of x, or one of each of two rows.
  static constexpr int kPairs =
      kPieces == 1 ? (kRows + 1) / 2 : kRows * ArmRowLayout<kPieces>::kPairs;
  int32x4_t sum[kPairs][kArmStrip / 2] = {};
#else
  int32x4_t sum[kRows][kPieces][kArmStrip / 4] = {};
#endif
};

#if defined(__ARM_FEATURE_MATMUL_INT8)

template <int kPieces, int kRows>
MLX_ANVIL_UNROLLED void ArmSums<kPieces, kRows>::add(const int8_t* codes,
                                                     const char* x,
                                                     int64_t x_step) {
  unroll<2>([&](auto half) __attribute__((always_inline)) {
    int8x16_t w[kArmStrip / 2];
    for (int i = 0; i < kArmStrip / 2; ++i) {
      w[i] = vld1q_s8(codes + (half.value * (kArmStrip / 2) + i) * 16);
    }
    unroll<kPairs>([&](auto pair) __attribute__((always_inline)) {
      int8x16_t lines;
      if constexpr (kPieces == 1) {
        constexpr int kSecond = 2 * pair.value + 1 < kRows ? 2 * pair.value + 1 : kRows - 1;
        const auto* const at = reinterpret_cast<const int8_t*>(x + half.value * 8);
        lines = vcombine_s8(vld1_s8(at + 2 * pair.value * x_step), vld1_s8(at + kSecond * x_step));
      } else {
        constexpr int kOfRow = ArmRowLayout<kPieces>::kPairs;
        lines = load_bits<int8x16_t>(x + pair.value / kOfRow * x_step +
                                     (half.value * kOfRow + pair.value % kOfRow) * 16);
      }
      for (int i = 0; i < kArmStrip / 2; ++i) {
        sum[pair.value][i] = squares(sum[pair.value][i], w[i], lines);
      }
    });
  });
}

template <int kPieces, int kRows>
MLX_ANVIL_UNROLLED void ArmSums<kPieces, kRows>::get(int m,
                                                     int quad,
                                                     int32x4_t (&sums)[kPieces]) const {
  for (int piece = 0; piece < kPieces; ++piece) {
    const int line = kPieces == 1 ? m : m * 2 * ArmRowLayout<kPieces>::kPairs + piece;
    const int32x4_t* const pairs = sum[line / 2] + 2 * quad;
    sums[piece] = line % 2 == 0 ? vuzp1q_s32(pairs[0], pairs[1]) : vuzp2q_s32(pairs[0], pairs[1]);
  }
}

#else

template <int kPieces, int kRows>
MLX_ANVIL_UNROLLED void ArmSums<kPieces, kRows>::add(const int8_t* codes,
                                                     const char* x,
                                                     int64_t x_step) {
  int8x16_t lines[kRows][kPieces];
  for (int m = 0; m < kRows; ++m) {
    for (int piece = 0; piece < kPieces; ++piece) {
      lines[m][piece] = load_bits<int8x16_t>(x + m * x_step + piece * 16);
    }
  }
  unroll<4>([&](auto word) __attribute__((always_inline)) {
    for (int quad = 0; quad < kArmStrip / 4; ++quad) {
      const int8x16_t w = vld1q_s8(codes + (word.value * (kArmStrip / 4) + quad) * 16);
      for (int m = 0; m < kRows; ++m) {
        for (int piece = 0; piece < kPieces; ++piece) {
          int32x4_t& to = sum[m][piece][quad];
          to = vdotq_laneq_s32(to, w, lines[m][piece], word.value);
        }
      }
    }
  });
}

template <int kPieces, int kRows>
MLX_ANVIL_UNROLLED void ArmSums<kPieces, kRows>::get(int m,
                                                     int quad,
                                                     int32x4_t (&sums)[kPieces]) const {
  for (int piece = 0; piece < kPieces; ++piece) {
    sums[piece] = sum[m][piece][quad];
  }
}

#endif

// Adds a tile's products to its totals.
template <int kPieces, int kRows, bool kHasBiases>
[[gnu::noinline]] void add_arm_tile(const ArmTile& tile) {
  const char* x = tile.x;
  const int8_t* codes = tile.codes;
  const float *steps = tile.steps, *scales = tile.scales;
  const int64_t floats_step = tile.x_step / static_cast<int64_t>(sizeof(float));
  for (int64_t group = 0; group < tile.groups; ++group) {
    for (int64_t unit = 0; unit < tile.units_of_group; ++unit, ++steps) {
      ArmSums<kPieces, kRows> of_unit;
      for (int64_t v = 0; v < tile.vectors_of_unit; ++v) {
        of_unit.add(codes, x, tile.x_step);
        codes += kArmStripBytes;
        x += ArmRowLayout<kPieces>::kVectorBytes;
      }
      unroll<kRows>([&](auto m) __attribute__((always_inline)) {
        const float step = steps[m.value * floats_step];
        unroll<kArmStrip / 4>([&](auto quad) __attribute__((always_inline)) {
          int32x4_t sums[kPieces];
          of_unit.get(m.value, quad.value, sums);
          float* const total = tile.totals + m.value * kArmPanel + quad.value * 4;
          vst1q_f32(total, add_unit<kPieces>(vld1q_f32(total), sums, step,
                                             vld1q_f32(scales + quad.value * 4)));
        });
      });
    }
    if constexpr (kHasBiases) {
      for (int m = 0; m < kRows; ++m) {
        const float sum = tile.sums[m * floats_step + group];
        for (int quad = 0; quad < kArmStrip / 4; ++quad) {
          float* const total = tile.totals + m * kArmPanel + quad * 4;
          const float32x4_t shifts = vld1q_f32(scales + kArmPanel + quad * 4);
          vst1q_f32(total, vfmaq_n_f32(vld1q_f32(total), shifts, sum));
        }
      }
    }
    scales += GroupScales<kArmPanel>::kFloatsOfGroup;
  }
}

// Products of one panel of w, in scratch memory.
template <class Format, int kPieces>
class ArmPanel {
 public:
  static constexpr int kRows = kArmPanel;  // of w

  // Bytes of scratch memory.
  static int64_t scratch(int64_t x_rows) {
    return kTotalsAt + x_rows * kArmPanel * static_cast<int64_t>(sizeof(float));
  }

  ArmPanel(const QuantizedMatrixView& matrix, char* scratch)
      : matrix_(matrix),
        layout_(matrix),
        codes_(reinterpret_cast<int8_t*>(scratch)),
        scales_(reinterpret_cast<float*>(scratch + kScalesAt)),
        totals_(reinterpret_cast<float*>(scratch + kTotalsAt)) {}

  // Products of rows [first, first + count) of w, without Format::kFactor.
  void multiply(int64_t first, int64_t count, const char* x, int64_t x_rows) {
    std::memset(totals_, 0, x_rows * kArmPanel * sizeof(float));
    const int64_t row_bytes = layout_.bytes(), group = layout_.group;
    const int64_t strips = (count + kArmStrip - 1) / kArmStrip;
    for (int64_t column = 0; column < layout_.columns; column += kArmChunk) {
      const int64_t left = layout_.columns - column;
      const int64_t columns = left < kArmChunk ? left : kArmChunk;
      scales_.template read<Format>(matrix_, first, count, column / group, columns / group);
      for (int64_t strip = 0; strip < strips; ++strip) {
        unpack(first, count, strip, column, columns);
      }
      constexpr int kTile = kArmTileRows<kPieces>;
      for (int64_t m = 0; m < x_rows; m += kTile) {
        const char* const row = x + m * row_bytes;
        for (int64_t strip = 0; strip < strips; ++strip) {
          const ArmTile tile = {row + layout_.vectors_at(column),
                                row_bytes,
                                layout_.steps(row) + column / layout_.unit,
                                layout_.sums(row) + column / group,
                                codes_ + strip * kArmChunk * kArmStrip,
                                scales_.of_group(0) + strip * kArmStrip,
                                totals_ + m * kArmPanel + strip * kArmStrip,
                                columns / group,
                                group / layout_.unit,
                                layout_.unit / 16};
          unroll<kTile>([&](auto fewer) {
            constexpr int kRows = fewer.value + 1;
            if (kRows == kTile ? x_rows - m >= kRows : x_rows - m == kRows) {
              add_arm_tile<kPieces, kRows, Format::kHasBiases>(tile);
            }
          });
        }
      }
    }
  }

  // [x_rows][kArmPanel]
  const float* totals() const { return totals_; }

 private:
  static constexpr int64_t kScalesAt = kArmPanel * kArmChunk;
  static constexpr int64_t kTotalsAt =
      kScalesAt + kArmChunk / 16 * GroupScales<kArmPanel>::kFloatsOfGroup * sizeof(float);

  void unpack(int64_t first, int64_t count, int64_t strip, int64_t column, int64_t columns) {
    const int64_t row_bytes = layout_.columns * Format::kBits / 8;
    const auto* const w = reinterpret_cast<const uint8_t*>(matrix_.weights.w);
    const uint8_t* rows[kArmStrip];
    for (int i = 0; i < kArmStrip; ++i) {
      // Past the last row of w, repeat it.
      const int64_t row = strip * kArmStrip + i;
      rows[i] =
          w + (first + (row < count ? row : count - 1)) * row_bytes + column * Format::kBits / 8;
    }
    int8_t* to = codes_ + strip * kArmChunk * kArmStrip;
    for (int64_t c = 0; c < columns; c += Format::kColumns) {
      int8x16_t codes[kArmStrip][Format::kVectors];
      for (int i = 0; i < kArmStrip; ++i) {
        uint8x16_t raw[Format::kRaw];
        Format::load(rows[i], raw);
        Format::codes(raw, codes[i]);
        rows[i] += Format::kColumns * Format::kBits / 8;
      }
      for (int v = 0; v < Format::kVectors; ++v, to += kArmStripBytes) {
        store_strip(codes, v, to);
      }
    }
  }

  MLX_ANVIL_UNROLLED static void store_strip(const int8x16_t (&codes)[kArmStrip][Format::kVectors],
                                             int v,
                                             int8_t* to) {
    if constexpr (kHasSquares) {
      for (int pair = 0; pair < kArmStrip / 2; ++pair) {
        const int64x2_t a = vreinterpretq_s64_s8(codes[2 * pair][v]);
        const int64x2_t b = vreinterpretq_s64_s8(codes[2 * pair + 1][v]);
        vst1q_s8(to + pair * 16, vreinterpretq_s8_s64(vzip1q_s64(a, b)));
        vst1q_s8(to + (kArmStrip / 2 + pair) * 16, vreinterpretq_s8_s64(vzip2q_s64(a, b)));
      }
    } else {
      for (int quad = 0; quad < kArmStrip / 4; ++quad) {
        i32v words[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          words[i] = bits_as<i32v>(codes[4 * quad + i][v]);
        }
        transpose(words);
        for (int word = 0; word < 4; ++word) {
          vst1q_s8(to + (word * (kArmStrip / 4) + quad) * 16, bits_as<int8x16_t>(words[word]));
        }
      }
    }
  }

  const QuantizedMatrixView& matrix_;
  const ArmRowLayout<kPieces> layout_;
  int8_t* const codes_;
  const GroupScales<kArmPanel> scales_;
  float* const totals_;
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

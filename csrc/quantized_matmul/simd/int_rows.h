// Rows of x for integer GEMV (int_gemv.cpp), and codes as bytes. For kernel files only, and only on
// machines with VNNI.
#pragma once

#include "quantized_matmul/simd/int_codes.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Codes per unit. 4-bit units have several words, because the per-block work is significant. The
// limits are the group size, and that sums of codes times X fit in 32 bits.
constexpr int int_unit_values(int bits, bool affine) {
  return bits != 4 ? unit_values(bits) : affine ? 32 : 16;
}

// Codes of a block as bytes: vector v has four codes of each unit, in the unit's lane.
template <class Format>
struct Bytes {
  static constexpr int kBits = Format::kBits;
  static constexpr int kValues = int_unit_values(kBits, Format::kHasBiases);
  static constexpr int kVectors = kValues / 4;
  using BlockUnits = Units<kBits, kValues>;
  // Subtracted from codes; nonzero for 4 bits, so that their sums fit.
  static constexpr int32_t kOffset = Format::kHasBiases && kBits != 4 ? 0 : Format::kOffset;
  static constexpr int32_t kMost =
      kOffset > Format::kLargest - kOffset ? kOffset : Format::kLargest - kOffset;

  // Index of the code in byte b of vector v. For 2 and 4 bits, codes stay where word shifts leave
  // them.
  static constexpr int code(int v, int b) {
    return kBits == 4 ? v / 2 * 8 + 2 * b + v % 2 : kBits == 2 ? 4 * b + v : 4 * v + b;
  }

  // Moves the lowest four codes of each lane to its bytes, leaving other bits above them:
  // multishift extracts any 8 consecutive bits of a 64-bit lane.
  static u32v spread(u32v codes) {
    constexpr int64_t kLane = kBits << 8 | 2 * kBits << 16 | int64_t{3 * kBits} << 24;
    constexpr int64_t kNextLane = kLane + 0x20202020;
    const __m512i places = _mm512_set1_epi64(kNextLane << 32 | kLane);
    return bits_as<u32v>(_mm512_multishift_epi64_epi8(places, bits_as<__m512i>(codes)));
  }

  // True if codes may stay in the upper half of a byte, where they count 16 times.
  static constexpr bool kHasHalves = kBits == 4 && Format::kHasBiases;

  // With kHighHalves, the codes of odd vectors stay in the upper half.
  template <int kVector, bool kHighHalves = false>
  static u32v vector(const BlockUnits& units) {
    if constexpr (kHighHalves && kVector % 2 == 1) {
      return units.words[kVector / 2] & 0xf0f0f0f0u;
    }
    if constexpr (kBits == 8) {
      return units.words[kVector];
    } else if constexpr (kBits == 2 || kBits == 4) {
      constexpr uint32_t kMask = kBits == 4 ? 0x0f0f0f0fu : 0x03030303u;
      constexpr int kPerWord = 8 / kBits;
      return Format::bytes((units.words[kVector / kPerWord] >> (kBits * (kVector % kPerWord))) &
                           kMask);
    } else {
      constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x01010101u;
      return spread(units.template shifted<4 * kVector, 4>()) & kMask;
    }
  }
};

// ---- x ------------------------------------------------------------------------------------------

// Layout of a packed row of x. For each block and vector, the bytes of each piece, lowest first.
// Then the step of each unit, by lanes; the correction for the offset of codes per unit; and for
// affine formats, the sum of X times its step per group.
struct IntRowLayout {
  int64_t columns, blocks, block_columns, groups;
  int pieces;

  explicit IntRowLayout(const QuantizedMatrixView& matrix)
      : columns(matrix.columns),
        block_columns(int64_t{int_unit_values(matrix.format.bits, matrix.format.has_biases())} *
                      kLanes),
        groups(columns / matrix.format.group),
        pieces(pieces_of(matrix)) {
    blocks = (columns + block_columns - 1) / block_columns;
  }

  int64_t steps_at() const { return blocks * block_columns * pieces; }
  int64_t offsets_at() const { return steps_at() + blocks * kLanes * 4; }
  int64_t sums_at() const { return offsets_at() + blocks * kLanes * 4; }
  // A whole number of cache lines, so that the vectors of all rows are aligned.
  int64_t bytes() const { return sums_at() + padded(groups) * 4; }
};

template <class Format, int kPieces>
bool pack_row(const QuantizedMatrixView& matrix, const float* x, char* to) {
  using Codes = Bytes<Format>;
  constexpr int kValues = Codes::kValues;
  const IntRowLayout layout(matrix);
  float* const steps = reinterpret_cast<float*>(to + layout.steps_at());
  float* const sums = reinterpret_cast<float*>(to + layout.sums_at());
  int32_t* const offsets = reinterpret_cast<int32_t*>(to + layout.offsets_at());
  const int group_shift = __builtin_ctz(static_cast<unsigned>(matrix.format.group));
  if constexpr (Format::kHasBiases) {
    std::memset(sums, 0, padded(layout.groups) * sizeof(float));
  }
  i32v units;
  for (int lane = 0; lane < kLanes; ++lane) {
    units[lane] = Codes::BlockUnits::unit_of_lane(lane) * kValues;
  }
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const int64_t first = block * layout.block_columns;
    f32v values[kValues];
    Largest largest;
    for (int i = 0; i < kValues; ++i) {
      values[i] = bits_as<f32v>(_mm512_i32gather_ps(bits_as<__m512i>(units), x + first + i, 4));
      largest.add(values[i]);
    }
    if (!largest.finite()) {
      return false;
    }
    const IntSteps<kPieces> steps_of_units(largest.value());
    i32v sum{};
    u32v* const out = reinterpret_cast<u32v*>(to + first * kPieces);
    unroll<Codes::kVectors>([&](auto v) {
      u32v words[kPieces] = {};
      unroll<4>([&](auto b) {
        i32v left = rounded(values[Codes::code(v.value, b.value)] * steps_of_units.factor);
        sum += left;
        for (u32v& word : words) {
          const i32v low = (left << 24) >> 24;
          word |= bits_as<u32v>(low & 0xff) << (8 * b.value);
          left = (left - low) >> 8;
        }
      });
      std::memcpy(out + v.value * kPieces, words, sizeof(words));
    });
    store_lanes(steps + block * kLanes, steps_of_units.step);
    if constexpr (Format::kHasBiases) {
      // Biases multiply the rounded x, as codes do. The rounding error of x is then multiplied by
      // w, and not by codes, which are much larger without their bias.
      const f32v of_units = __builtin_convertvector(sum, f32v) * steps_of_units.step;
      for (int lane = 0; lane < kLanes; ++lane) {
        sums[(first + units[lane]) >> group_shift] += of_units[lane];
      }
    }
    const u32v offset = bits_as<u32v>(sum) * static_cast<uint32_t>(-Codes::kOffset);
    std::memcpy(offsets + block * kLanes, &offset, sizeof(offset));
  }
  return true;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

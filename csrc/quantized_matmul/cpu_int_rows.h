// Rows of x for products in integers (cpu_int_gemv.cpp), and codes as bytes. Kernel files only, and
// only where the machine has byte products.
#pragma once

#include "quantized_matmul/cpu_int_codes.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Bytes that an element of x is taken apart into. A block is long enough for 16 bits to be felt in
// float16.
constexpr int pieces_of(QuantizedDtype dtype) {
  return dtype == QuantizedDtype::kBfloat16 ? 2 : 3;
}

constexpr int64_t padded(int64_t count) {
  return (count + kLanes - 1) / kLanes * kLanes;
}

inline float sum_of_lanes(f32v x) {
  return _mm512_reduce_add_ps(bits_as<__m512>(x));
}

// Codes in a unit. Of 4 bits 16, two words: what is done once for each block is a good part of the
// work.
constexpr int int_unit_values(int bits) {
  return bits == 4 ? 16 : unit_values(bits);
}

// The codes of a block in bytes: vector v has four codes of each unit, in the unit's lane.
template <class Format>
struct Bytes {
  static constexpr int kBits = Format::kBits;
  static constexpr int kValues = int_unit_values(kBits);
  static constexpr int kVectors = kValues / 4;
  using BlockUnits = Units<kBits, kValues>;

  // The code of byte b of vector v. Codes of 2 and 4 bits stay where shifting whole words puts
  // them.
  static constexpr int code(int v, int b) {
    return kBits == 4 ? v / 2 * 8 + 2 * b + v % 2 : kBits == 2 ? 4 * b + v : 4 * v + b;
  }

  // The lowest four codes of each lane to its bytes, with other bits above them: a byte of the
  // result is any 8 bits in a row of its pair of lanes.
  static u32v spread(u32v codes) {
    constexpr int64_t kLane = kBits << 8 | 2 * kBits << 16 | int64_t{3 * kBits} << 24;
    constexpr int64_t kNextLane = kLane + 0x20202020;
    const __m512i places = _mm512_set1_epi64(kNextLane << 32 | kLane);
    return bits_as<u32v>(_mm512_multishift_epi64_epi8(places, bits_as<__m512i>(codes)));
  }

  template <int kVector>
  static u32v vector(const BlockUnits& units) {
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

// A row of x: for each block and vector the bytes of each piece, lowest first; then one step for
// each block; then the sum of X of every group, times its step (affine), or of every lane of a
// block (the others).
struct IntRowLayout {
  int64_t columns, blocks, block_columns, groups, group;
  int pieces;

  explicit IntRowLayout(const QuantizedMatrixView& matrix)
      : columns(matrix.columns),
        block_columns(int64_t{int_unit_values(matrix.format.bits)} * kLanes),
        group(matrix.format.group),
        pieces(pieces_of(matrix.dtype)) {
    blocks = (columns + block_columns - 1) / block_columns;
    groups = columns / group;
  }

  int64_t steps_at() const { return blocks * block_columns * pieces; }
  int64_t sums_at() const { return steps_at() + padded(blocks) * 4; }
  // Of whole cache lines, in which the vectors of all rows lie.
  int64_t bytes() const { return sums_at() + (padded(groups) + blocks * kLanes) * 4; }
};

// 2^e for e that a float32's exponent has.
inline float power_of_two(int e) {
  return bits_as<float>(static_cast<uint32_t>(e + 127) << 23);
}

// The power of two that takes `largest` to pieces * 8 - 1 bits, the sign included.
inline int exponent_for(float largest, int pieces) {
  constexpr int kLeast = -90;  // so that the power and its inverse are ordinary numbers
  const uint32_t bits = bits_as<uint32_t>(largest);
  // Rounded up a little: the highest byte has 127 where the lower ones would carry into it.
  const int exponent = static_cast<int>((bits + (1u << 17)) >> 23) - 127;
  return 8 * pieces - 2 - (exponent < kLeast ? kLeast : exponent);
}

template <class Format>
bool pack_row(const QuantizedMatrixView& matrix, const float* x, char* to) {
  using Codes = Bytes<Format>;
  const IntRowLayout layout(matrix);
  float* const steps = reinterpret_cast<float*>(to + layout.steps_at());
  float* const sums = reinterpret_cast<float*>(to + layout.sums_at());
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const int64_t first = block * layout.block_columns;
    const float* const from = x + first;
    f32v largest{};
    i32v finite = i32v{} - 1;
    for (int64_t i = 0; i < layout.block_columns; i += kLanes) {
      const f32v size = absolute(load_lanes(from + i));
      largest = size > largest ? size : largest;
      finite &= size < splat(__builtin_inff());
    }
    if (_mm512_reduce_and_epi32(bits_as<__m512i>(finite)) == 0) {
      return false;
    }
    const float most = _mm512_reduce_max_ps(bits_as<__m512>(largest));
    const int exponent = exponent_for(most, layout.pieces);
    const float factor = power_of_two(exponent);
    steps[block] = power_of_two(-exponent);
    int32_t numbers[kQuantizedIntVectors * kLanes];
    for (int64_t i = 0; i < layout.block_columns; i += kLanes) {
      const __m512 scaled = bits_as<__m512>(load_lanes(from + i) * factor);
      const i32v rounded = bits_as<i32v>(_mm512_cvtps_epi32(scaled));
      std::memcpy(numbers + i, &rounded, sizeof(rounded));
    }
    if constexpr (!Format::kHasBiases) {
      int32_t* const lane_sums = reinterpret_cast<int32_t*>(sums) + block * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) {
        lane_sums[lane] = 0;
        for (int i = 0; i < Codes::kValues; ++i) {
          lane_sums[lane] += numbers[lane * Codes::kValues + i];
        }
      }
    }
    int8_t pieces[3][kQuantizedIntVectors * kLanes];
    for (int64_t i = 0; i < layout.block_columns; i += kLanes) {
      i32v left = load_bits<i32v>(numbers + i);
      for (int p = 0; p < layout.pieces; ++p) {
        const i32v low = (left << 24) >> 24;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(pieces[p] + i),
                         _mm512_cvtepi32_epi8(bits_as<__m512i>(low)));
        left = (left - low) >> 8;
      }
    }
    int8_t* const out = reinterpret_cast<int8_t*>(to + first * layout.pieces);
    for (int p = 0; p < layout.pieces; ++p) {
      unroll<Codes::kVectors>([&](auto v) {
        int8_t* const vector = out + (v.value * layout.pieces + p) * 64;
        for (int lane = 0; lane < kLanes; ++lane) {
          const int8_t* const unit = pieces[p] + lane * Codes::kValues;
          unroll<4>(
              [&](auto b) { vector[lane * 4 + b.value] = unit[Codes::code(v.value, b.value)]; });
        }
      });
    }
  }
  // Biases multiply the same numbers as codes do, so that what rounding x changes is multiplied by
  // w, not by the codes, which are much larger without their bias.
  for (int64_t group = 0; Format::kHasBiases && group < padded(layout.groups); ++group) {
    f32v sum{};
    for (int64_t i = 0; group < layout.groups && i < layout.group; i += kLanes) {
      const int64_t column = group * layout.group + i;
      const float step = steps[column / layout.block_columns];
      sum += __builtin_convertvector(rounded(load_lanes(x + column) * (1.0f / step)), f32v) * step;
    }
    sums[group] = sum_of_lanes(sum);
  }
  return true;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

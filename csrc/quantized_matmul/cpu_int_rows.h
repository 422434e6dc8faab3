// Rows of x for products in integers (cpu_int_gemv.cpp), and codes as bytes. Kernel files only, and
// only where the machine has byte products.
#pragma once

#include <array>

#include "quantized_matmul/cpu_unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Bytes that an element of x is taken apart into. Of the 16-bit dtypes an element is exact unless
// it is less than 2^-5 (float16) or 2^-8 (bfloat16) of the largest of its block.
constexpr int pieces_of(QuantizedDtype dtype) {
  return dtype == QuantizedDtype::kFloat32 ? 3 : 2;
}

constexpr int64_t padded(int64_t count) {
  return (count + kLanes - 1) / kLanes * kLanes;
}

inline float sum_of_lanes(f32v x) {
  return _mm512_reduce_add_ps(bits_as<__m512>(x));
}

// ---- codes --------------------------------------------------------------------------------------

// A block of a row of w is what a vector holds: a cache line of codes of 2, 4 or 8 bits as they
// are, or 64 codes in bytes. Its words are taken apart into vectors of bytes after they have met
// those of other rows in a vector.
template <class Format>
struct Bytes {
  static constexpr int kBits = Format::kBits;
  static constexpr bool kWhole = kBits == 2 || kBits == 4 || kBits == 8;
  static constexpr int kPerWord = kWhole ? 8 / kBits : 1;  // vectors of bytes of one of words
  static constexpr int64_t kColumns = 64 * kPerWord;
  static constexpr int64_t kBlockBytes = kColumns * kBits / 8;

  // The column of byte b of word w, of its vector of bytes i.
  static constexpr int column(int w, int i, int b) { return (4 * w + b) * kPerWord + i; }

  // A block of which `bytes` are in the row; zeros in place of the others.
  static u32v words(const char* from, int64_t bytes) {
    const __mmask64 there =
        bytes >= kBlockBytes ? ~uint64_t{0} >> (64 - kBlockBytes) : (uint64_t{1} << bytes) - 1;
    const __m512i packed = _mm512_maskz_loadu_epi8(there, from);
    if constexpr (kWhole) {
      return bits_as<u32v>(packed);
    } else {
      // Eight codes are kBits bytes: those to each 64 bits, and of these any 8 bits in a row.
      alignas(64) static constexpr auto kBytes = [] {
        std::array<uint8_t, 64> bytes{};
        for (int i = 0; i < 64; ++i) {
          bytes[i] = static_cast<uint8_t>(i / 8 * kBits + i % 8);
        }
        return bytes;
      }();
      constexpr uint64_t kPlaces = [] {
        uint64_t places = 0;
        for (int i = 0; i < 8; ++i) {
          places |= static_cast<uint64_t>(i * kBits) << (8 * i);
        }
        return places;
      }();
      const __m512i eights = _mm512_permutexvar_epi8(_mm512_load_si512(kBytes.data()), packed);
      const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(kPlaces), eights);
      return bits_as<u32v>(codes) & ((1u << kBits) - 1) * 0x01010101u;
    }
  }

  template <int kIndex>
  static u32v bytes(u32v words) {
    if constexpr (kPerWord == 1) {
      return words;
    } else {
      return Format::bytes((words >> (kBits * kIndex)) & ((1u << kBits) - 1) * 0x01010101u);
    }
  }
};

// How bytes stand for values: value = (byte - kOffset) * kFactor + (affine) kOffset. Bytes are at
// most kLargest, groups at most kLargestGroup.
template <int kBits_>
struct IntAffine {
  static constexpr int kBits = kBits_, kLargest = (1 << kBits) - 1, kLargestGroup = 128;
  static constexpr bool kHasBiases = true;
  static constexpr int32_t kOffset = 1 << (kBits - 1);
  static constexpr float kFactor = 1.0f;
  static u32v bytes(u32v codes) { return codes; }
};

struct IntE2m1 {
  static constexpr int kBits = 4, kLargest = 24, kLargestGroup = 32;
  static constexpr bool kHasBiases = false;
  static constexpr int32_t kOffset = 12;
  static constexpr float kFactor = 0.5f;
  static u32v bytes(u32v codes) {
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return bits_as<u32v>(_mm512_shuffle_epi8(table, bits_as<__m512i>(codes)));
  }
};

template <class Action>
inline void with_int_format(const QuantizedFormat& format, Action action) {
  if (!format.has_biases()) {
    return action(IntE2m1());
  }
  switch (format.bits) {
    case 2:
      return action(IntAffine<2>());
    case 3:
      return action(IntAffine<3>());
    case 4:
      return action(IntAffine<4>());
    case 5:
      return action(IntAffine<5>());
    case 6:
      return action(IntAffine<6>());
    default:
      return action(IntAffine<8>());
  }
}

// ---- sums ---------------------------------------------------------------------------------------

// Adds to each lane of `sum` its four codes times the four signed bytes of x. In one instruction,
// which compilers make two of: they would load many words of x at once, for want of registers into
// memory again.
inline i32v with_products(i32v sum, u32v codes, const int32_t& x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(x));
  return sum;
}

// The sums of all pieces together, over at most kCount bytes, less `offset` times the sum of X.
template <class Format, int kCount, int kPieces>
inline f32v in_floats(const i32v (&sums)[kPieces], int32_t offset, int32_t sum_of_x) {
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

// ---- x ------------------------------------------------------------------------------------------

// All rows of x together: for each vector of bytes the four bytes that meet each lane's, for every
// row and piece, lowest piece first. Then one step for each block and row. Then for every group and
// row the sum of X, as float32 times the step (affine), or as an integer (the others).
struct IntRowsLayout {
  int64_t columns, blocks, vectors, group, groups, rows;
  int pieces, group_shift;

  IntRowsLayout(const QuantizedMatrixView& matrix, int64_t block_columns, int64_t rows_)
      : columns(matrix.columns),
        blocks((columns + block_columns - 1) / block_columns),
        vectors(block_columns / 4),
        group(matrix.format.group),
        groups(columns / group),
        rows(rows_),
        pieces(pieces_of(matrix.dtype)),
        group_shift(__builtin_ctz(static_cast<unsigned>(group))) {}

  int64_t block_words() const { return vectors * rows * pieces; }
  int64_t steps_at() const { return padded(blocks * block_words()); }
  int64_t sums_at() const { return steps_at() + padded(blocks * rows); }
  int64_t words() const { return sums_at() + padded(groups * rows); }
};

// 2^e for e that a float32's exponent has.
inline float power_of_two(int e) {
  return bits_as<float>(static_cast<uint32_t>(e + 127) << 23);
}

// The power of two that takes `largest` to `bits` bits, its sign among them.
inline int exponent_for(float largest, int bits) {
  constexpr int kLeast = -90;  // so that the power and its inverse are ordinary numbers
  // Rounded up a little: the highest byte has 127 where the lower ones would carry into it.
  const int exponent = static_cast<int>((bits_as<uint32_t>(largest) + (1u << 17)) >> 23) - 127;
  return bits - 2 - (exponent < kLeast ? kLeast : exponent);
}

inline i32v rounded(f32v x) {
  return bits_as<i32v>(_mm512_cvtps_epi32(bits_as<__m512>(x)));
}

// The largest magnitude; infinity or NaN if any is.
inline float largest_of(const float* x, int64_t count) {
  u32v largest{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const u32v size = bits_as<u32v>(absolute(load_lanes(x + i)));  // as integers they compare alike
    largest = size > largest ? size : largest;
  }
  return bits_as<float>(_mm512_reduce_max_epu32(bits_as<__m512i>(largest)));
}

// Row m of x, of float32 with zeros beyond its columns. False: it has a number that is not finite,
// and nothing of use was written.
template <class Format>
bool pack_row(const QuantizedMatrixView& matrix,
              const float* x,
              int64_t m,
              IntRowsLayout layout,
              int32_t* to) {
  using Codes = Bytes<Format>;
  constexpr int64_t kColumns = Codes::kColumns;
  float* const steps = reinterpret_cast<float*>(to + layout.steps_at()) + m;
  int32_t* const sums = to + layout.sums_at() + m;
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const float* const from = x + block * kColumns;
    const float largest = largest_of(from, kColumns);
    if (!(largest < __builtin_inff())) {
      return false;
    }
    const int exponent = exponent_for(largest, 8 * layout.pieces);
    const float factor = power_of_two(exponent);
    steps[block * layout.rows] = power_of_two(-exponent);
    for (int64_t i = 0; i < kColumns; i += kLanes) {
      i32v left = rounded(load_lanes(from + i) * factor);
      // 16 columns are the words of four vectors.
      int32_t* const words =
          to + block * layout.block_words() + (i / 4 * layout.rows + m) * layout.pieces;
      for (int p = 0; p < layout.pieces; ++p) {
        const i32v low = (left << 24) >> 24;
        left = (left - low) >> 8;
        alignas(16) int8_t natural[kLanes], ordered[kLanes];
        _mm_store_si128(reinterpret_cast<__m128i*>(natural),
                        _mm512_cvtepi32_epi8(bits_as<__m512i>(low)));
        unroll<kLanes>([&](auto lane) {
          constexpr int kVector = lane.value / 4, kByte = lane.value % 4;
          ordered[lane.value] =
              natural[Codes::column(kVector / Codes::kPerWord, kVector % Codes::kPerWord, kByte)];
        });
        for (int v = 0; v < 4; ++v) {
          std::memcpy(words + v * layout.rows * layout.pieces + p, ordered + 4 * v, 4);
        }
      }
    }
  }
  // Biases multiply the same numbers as codes do, so that what rounding x changes is multiplied by
  // w, not by the codes, which are much larger without their bias.
  for (int64_t group = 0; group < layout.groups; ++group) {
    f32v sum{};
    i32v sum_of_x{};
    for (int64_t i = group * layout.group; i < (group + 1) * layout.group; i += kLanes) {
      const float step = steps[i / kColumns * layout.rows];
      const i32v numbers = rounded(load_lanes(x + i) * (1.0f / step));
      sum += __builtin_convertvector(numbers, f32v) * step;
      sum_of_x += numbers;
    }
    sums[group * layout.rows] = Format::kHasBiases
                                    ? bits_as<int32_t>(sum_of_lanes(sum))
                                    : _mm512_reduce_add_epi32(bits_as<__m512i>(sum_of_x));
  }
  return true;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// Products of a few rows with quantized keys and values in integers, for queries of 16 bits:
//   q ~= step * Q      p * scale ~= step * W      Q, W signed 16-bit integers, |Q|, |W| <= 32767
//   sum of code * q ~= step * (sum of code * Q), which is exact
// There is one step per row of q, and per row, group and kBlockKeys keys of values. One instruction
// sums two products, so unpacked codes need no conversion. For kernel files only (see
// common/simd/simd.h).
#pragma once

#include "flash_attention/simd/rows.h"
#include "flash_attention/simd/stream.h"
#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX2__)
inline constexpr bool kHasPairProducts = true;
#else
inline constexpr bool kHasPairProducts = false;
#endif

// Adds a[0] b[0] + a[1] b[1] to each lane, of the two 16-bit integers in it.
inline i32v add_pair_products(i32v sum, u32v a, u32v b) {
#if defined(__AVX512VNNI__)
  return bits_as<i32v>(
      _mm512_dpwssd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(a), bits_as<__m512i>(b)));
#elif defined(__AVX512BW__)
  return sum + bits_as<i32v>(_mm512_madd_epi16(bits_as<__m512i>(a), bits_as<__m512i>(b)));
#elif defined(__AVX2__)
  return sum + bits_as<i32v>(_mm256_madd_epi16(bits_as<__m256i>(a), bits_as<__m256i>(b)));
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto half = [lane](u32v x, int shift) { return static_cast<int16_t>(x[lane] >> shift); };
    sum[lane] += half(a, 0) * half(b, 0) + half(a, 16) * half(b, 16);
  }
  return sum;
#endif
}

// ---- formats ------------------------------------------------------------------------------------

// How a format's codes become integers: value = factor * integer + zero. Only formats whose codes
// do not straddle words, and whose values have few digits, have a specialisation.
template <class Format>
struct IntegerCodes {
  static constexpr bool kHas = false;
};

template <int kBits>
  requires(32 % kBits == 0)
struct IntegerCodes<Affine<kBits>> {
  static constexpr bool kHas = kHasPairProducts;
  static constexpr float kFactor = 1.0f, kZero = 0.0f;

  // The integers of the codes in the lowest bits of both halves of each lane.
  static u32v of(u32v codes) { return codes & ((1u << kBits) - 1u) * 0x10001u; }
};

template <>
struct IntegerCodes<E2m1> {
  static constexpr bool kHas = kHasPairProducts;
  static constexpr float kFactor = 0.5f, kZero = -6.0f;

  static u32v of(u32v codes) {
    alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                       12, 11, 10, 9,  8,  6,  4,  0};
    const u32v index = (codes & 0x000f000fu) | 0x80008000u;  // the upper bytes become 0
#if defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(load_bits<__m128i>(kTable));
    return bits_as<u32v>(_mm512_shuffle_epi8(table, bits_as<__m512i>(index)));
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(load_bits<__m128i>(kTable));
    return bits_as<u32v>(_mm256_shuffle_epi8(table, bits_as<__m256i>(index)));
#else
    u32v integers;
    for (int lane = 0; lane < kLanes; ++lane) {
      integers[lane] = kTable[index[lane] & 15u] | kTable[index[lane] >> 16 & 15u] << 16;
    }
    return integers;
#endif
  }
};

// Loads `count` words, at most kLanes, with zeros in the remaining lanes.
inline u32v load_words_of(const uint32_t* from, int64_t count) {
  if (count >= kLanes) {
    return load_bits<u32v>(from);
  }
#if defined(__AVX512F__)
  return bits_as<u32v>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1u), from));
#else
  uint32_t some[kLanes] = {};
  std::memcpy(some, from, count * sizeof(uint32_t));
  return load_bits<u32v>(some);
#endif
}

// ---- to integers --------------------------------------------------------------------------------

// The largest magnitude of all lanes, as bits: NaN counts above infinity.
inline uint32_t largest_bits(u32v magnitudes) {
  uint32_t most = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    most = magnitudes[lane] > most ? magnitudes[lane] : most;
  }
  return most;
}

inline constexpr uint32_t kInfinityBits = 0x7f800000u;
inline constexpr float kMostInteger = 32767.0f;

// Rounds x * inverse to 16-bit integers, which it leaves in the lower halves of the lanes.
inline u32v to_integers(f32v x, float inverse) {
  return bits_as<u32v>(x * inverse + 12582912.0f);  // 1.5 * 2^23: the sum's unit is 1
}

inline float step_of(float largest) {
  return largest / kMostInteger;
}
inline float inverse_of(float largest) {
  return largest < 1e-30f ? 0.0f : kMostInteger / largest;  // of less, the inverse may overflow
}

// The rows of codes of a tile, and of `ahead` rows after it, for prefetches.
struct CodeList {
  const uint32_t* const* rows;
  int64_t ahead;
};

// The scales and biases of integers, [group][stride of rows]. A stride is a whole number of panels.
struct IntegerNumbers {
  const float* scales;
  const float* biases;
  int64_t stride;
  int64_t groups;
  int64_t group;  // columns
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// Superblocks of w as bytes, for the integer products. For kernel files only, and only on machines
// with VNNI. Each format reads 256 columns:
//
//   codes   four vectors of 64 columns in order; W = scale * (byte - kOffset) - min
//   scales  for each 16 or 32 columns (kGroup): with kMins, scale and min in turn; otherwise the
//           scales, with zeros above
#pragma once

#include "common/simd/unroll.h"
#include "gguf_matmul/simd/kernels.h"
#include "quantized_matmul/simd/int_products.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

constexpr int kGgufVectors = 4;  // of a superblock

using GgufCodes = __m512i[kGgufVectors];

template <class Element>
inline u32v gguf_lanes(Element element) {
  u32v lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = static_cast<uint32_t>(element(lane));
  }
  return lanes;
}

inline __m512i gguf_low_halves(__m512i bytes) {
  return _mm512_and_si512(bytes, _mm512_set1_epi8(15));
}

// (bytes & 15) | high
inline __m512i gguf_join(__m512i bytes, __m512i high) {
  return _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi8(15), high, 0xea);
}

// Shifts for halves of 32 or of 16 columns.
inline __m512i gguf_split_halves(__m512i twice, int bit_lane) {
  const u32v shifts = gguf_lanes([=](int lane) { return lane & bit_lane ? 4 : 0; });
  return gguf_low_halves(_mm512_srlv_epi32(twice, bits_as<__m512i>(shifts)));
}

inline __m512i gguf_twice(const uint8_t* from) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline __m512i gguf_iq4_bytes(__m512i codes) {
  alignas(16) static constexpr uint8_t kBytes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                     129, 141, 153, 166, 181, 197, 217, 241};
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kBytes)));
  return _mm512_shuffle_epi8(table, codes);
}

inline f32v gguf_half_of_all(const uint8_t* from) {
  int16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bits_as<f32v>(_mm512_cvtph_ps(_mm256_set1_epi16(bits)));
}

// d * scale and dmin * min in turn, of q4_k and q5_k.
inline f32v gguf_scales_and_mins(const uint8_t* block) {
  uint32_t s[3], d;
  std::memcpy(s, block + 4, sizeof(s));
  std::memcpy(&d, block, sizeof(d));
  const uint64_t scales = (s[0] & 0x3f3f3f3fu) |
                          uint64_t{(s[2] & 0x0f0f0f0fu) | ((s[0] >> 6) & 0x03030303u) << 4} << 32;
  const uint64_t mins =
      (s[1] & 0x3f3f3f3fu) | uint64_t{(s[2] >> 4 & 0x0f0f0f0fu) | ((s[1] >> 6) & 0x03030303u) << 4}
                                 << 32;
  const __m128i bytes = _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<long long>(scales)),
                                          _mm_cvtsi64_si128(static_cast<long long>(mins)));
  const __m512 halves = _mm512_cvtph_ps(_mm256_set1_epi32(static_cast<int>(d)));
  return bits_as<f32v>(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), halves));
}

struct GgufQ4K {
  static constexpr GgufKind kKind = GgufKind::kQ4K;
  static constexpr bool kMins = true;
  static constexpr int kGroup = 32, kOffset = 0, kMost = 15;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    unroll<kGgufVectors>([&](auto j) __attribute__((always_inline)) {
      codes[j.value] = gguf_split_halves(gguf_twice(from + 16 + 32 * j.value), 8);
    });
    return gguf_scales_and_mins(from);
  }
};

struct GgufQ5K {
  static constexpr GgufKind kKind = GgufKind::kQ5K;
  static constexpr bool kMins = true;
  static constexpr int kGroup = 32, kOffset = 0, kMost = 31;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    const __m512i high = gguf_twice(from + 16);
    unroll<kGgufVectors>([&](auto j) __attribute__((always_inline)) {
      const u32v shifts = gguf_lanes([](int lane) { return lane & 8 ? 4 : 0; });
      // Rotates bit 2 j, or 2 j + 1 in the upper half, to bit 4.
      const u32v turns =
          gguf_lanes([=](int lane) { return (32 + 4 - 2 * j.value - (lane & 8 ? 1 : 0)) % 32; });
      const __m512i top =
          _mm512_and_si512(_mm512_rolv_epi32(high, bits_as<__m512i>(turns)), _mm512_set1_epi8(16));
      codes[j.value] = gguf_join(
          _mm512_srlv_epi32(gguf_twice(from + 48 + 32 * j.value), bits_as<__m512i>(shifts)), top);
    });
    return gguf_scales_and_mins(from);
  }
};

struct GgufQ6K {
  static constexpr GgufKind kKind = GgufKind::kQ6K;
  static constexpr bool kMins = false;
  static constexpr int kGroup = 16, kOffset = 32, kMost = 32;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      const __m512i low = _mm512_loadu_si512(from + 64 * half.value);
      const __m512i high = gguf_twice(from + 128 + 32 * half.value);
      const auto top = [&](auto shift) __attribute__((always_inline)) {
        const u32v turns = gguf_lanes([=](int lane) {  // bits 2 q and 2 q + 1 to bits 4 and 5
          return (32 + 4 - shift.value - (lane & 8 ? 2 : 0)) % 32;
        });
        return _mm512_and_si512(_mm512_rolv_epi32(high, bits_as<__m512i>(turns)),
                                _mm512_set1_epi8(48));
      };
      codes[2 * half.value] = gguf_join(low, top(std::integral_constant<int, 0>()));
      codes[2 * half.value + 1] =
          gguf_join(_mm512_srli_epi16(low, 4), top(std::integral_constant<int, 4>()));
    });
    const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 192));
    return bits_as<f32v>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales))) *
           gguf_half_of_all(from + 208);
  }
};

struct GgufIq4Xs {
  static constexpr GgufKind kKind = GgufKind::kIq4Xs;
  static constexpr bool kMins = false;
  static constexpr int kGroup = 32, kOffset = 128, kMost = 128;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    const __m512i order = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
    unroll<kGgufVectors>([&](auto j) __attribute__((always_inline)) {
      const __m512i bytes = _mm512_castsi256_si512(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 8 + 32 * j.value)));
      codes[j.value] = gguf_iq4_bytes(gguf_split_halves(_mm512_permutexvar_epi64(order, bytes), 4));
    });
    uint32_t low;
    uint16_t high;
    std::memcpy(&low, from + 4, sizeof(low));
    std::memcpy(&high, from + 2, sizeof(high));
    // Half j of `low` and bits 2 j, 2 j + 1 of `high` to lane j.
    const __m256i lanes = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i tops = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    const __m256i nibbles = _mm256_and_si256(
        _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(low)), lanes), _mm256_set1_epi32(15));
    const __m256i twos =
        _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(high), tops), _mm256_set1_epi32(3));
    const __m256i scales = _mm256_sub_epi32(_mm256_or_si256(nibbles, _mm256_slli_epi32(twos, 4)),
                                            _mm256_set1_epi32(32));
    return bits_as<f32v>(_mm512_cvtepi32_ps(_mm512_zextsi256_si512(scales))) *
           gguf_half_of_all(from);
  }
};

// Puts the scales of pairs of blocks, words 0 and kSecond of each vector, into lanes.
template <int kSecond>
inline f32v gguf_scales_of_pairs(const GgufCodes& pairs) {
  const __m512i order = _mm512_set1_epi32(kSecond << 16);
  __m512i halves = _mm512_setzero_si512();
  unroll<kGgufVectors>([&](auto j) __attribute__((always_inline)) {
    halves = _mm512_mask_permutexvar_epi16(halves, 3u << (2 * j.value), order, pairs[j.value]);
  });
  return bits_as<f32v>(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
}

// Codes of pairs of blocks of 18 bytes.
MLX_ANVIL_UNROLLED f32v gguf_load_short(const uint8_t* from, GgufCodes& codes) {
  const __m512i order = bits_as<__m512i>(gguf_lanes([](int lane) {
    return (lane / 8 * 18 + 2 + lane % 4 * 4) * 0x01010101 + 0x03020100;  // bytes, not swapped
  }));
  GgufCodes pairs;
  unroll<kGgufVectors>([&](auto j) __attribute__((always_inline)) {
    pairs[j.value] = _mm512_maskz_loadu_epi8((uint64_t{1} << 36) - 1, from + 36 * j.value);
    codes[j.value] = gguf_split_halves(_mm512_permutexvar_epi8(order, pairs[j.value]), 4);
  });
  return gguf_scales_of_pairs<9>(pairs);
}

struct GgufQ4_0 {
  static constexpr GgufKind kKind = GgufKind::kQ4_0;
  static constexpr bool kMins = false;
  static constexpr int kGroup = 32, kOffset = 8, kMost = 8;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    return gguf_load_short(from, codes);
  }
};

struct GgufIq4Nl {
  static constexpr GgufKind kKind = GgufKind::kIq4Nl;
  static constexpr bool kMins = false;
  static constexpr int kGroup = 32, kOffset = 128, kMost = 128;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    const f32v scales = gguf_load_short(from, codes);
    for (__m512i& own : codes) {
      own = gguf_iq4_bytes(own);
    }
    return scales;
  }
};

struct GgufQ8_0 {
  static constexpr GgufKind kKind = GgufKind::kQ8_0;
  static constexpr bool kMins = false;
  static constexpr int kGroup = 32, kOffset = 128, kMost = 128;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    GgufCodes pairs;
    unroll<kGgufVectors>([&](auto j) __attribute__((always_inline)) {
      const uint8_t* const pair = from + 68 * j.value;
      pairs[j.value] = _mm512_loadu_si512(pair);
      const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair + 2));
      const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair + 36));
      codes[j.value] =
          _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1),
                           _mm512_set1_epi8(static_cast<char>(0x80)));
    });
    return gguf_scales_of_pairs<17>(pairs);
  }
};

template <class Action>
inline void with_gguf_format(GgufKind kind, Action action) {
  switch (kind) {
    case GgufKind::kQ4_0:
      return action(GgufQ4_0());
    case GgufKind::kQ8_0:
      return action(GgufQ8_0());
    case GgufKind::kQ4K:
      return action(GgufQ4K());
    case GgufKind::kQ5K:
      return action(GgufQ5K());
    case GgufKind::kQ6K:
      return action(GgufQ6K());
    case GgufKind::kIq4Nl:
      return action(GgufIq4Nl());
    case GgufKind::kIq4Xs:
      return action(GgufIq4Xs());
  }
}

constexpr int64_t gguf_superblock_bytes(GgufKind kind) {
  return kGgufSuperblock / gguf_block_columns(kind) * gguf_block_bytes(kind);
}

// The view of the integer products of quantized_matmul: 8-bit codes with an offset of 128.
inline QuantizedMatrixView gguf_bytes_view(const GgufView& matrix, int group) {
  return {{QuantizedKind::kAffine, 8, group, matrix.activation_bits},
          matrix.dtype,
          matrix.columns,
          matrix.outputs,
          {}};
}

template <class Action>
inline void with_gguf_pieces(const GgufView& matrix, Action action) {
  with_pieces(gguf_bytes_view(matrix, 32), action);
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

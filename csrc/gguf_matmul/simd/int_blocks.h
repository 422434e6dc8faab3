// Superblocks of w as bytes, for the integer products. For kernel files only, and only on machines
// with VNNI. Each format reads 256 columns:
//
//   codes   four vectors of bytes; W = scale * (byte - kOffset) - min. Lane l of vector v has the
//           columns [4 w, 4 w + 4) with w = word(v, l)
//   scales  for each 16 or 32 columns (kGroup): with kMins, scale and min in turn; otherwise the
//           scales, with zeros above
//
// With kPairs, a lane has columns of one group in vectors 0 and 1, and in vectors 2 and 3, so that
// their products can be added before they meet the scale.
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

// The orders of columns.
struct GgufNatural {
  static constexpr bool kPairs = false;
  static constexpr int word(int vector, int lane) { return kLanes * vector + lane; }
};

// Of 16 bytes whose low and high halves are the two halves of a group: vectors of low and of high
// halves, from 4 groups.
struct GgufHalvesOfGroups {
  static constexpr bool kPairs = true;
  static constexpr int word(int vector, int lane) {
    return 32 * (vector / 2) + 8 * (lane / 4) + 4 * (vector % 2) + lane % 4;
  }
};

// Of 32 bytes whose low and high halves are two groups. Of each 16 bytes, the first vector has low
// halves of the first 8 and high halves of the others. The second vector has what is left, with its
// 8 bytes swapped.
struct GgufGroupsOfHalves {
  static constexpr bool kPairs = true;
  static constexpr int word(int vector, int lane) {
    const int run = 2 * (vector / 2) + lane / 8, is_high = lane / 2 % 2;
    return 16 * run + 8 * is_high + 4 * (lane / 4 % 2) + 2 * (is_high ^ (vector % 2)) + lane % 2;
  }
};

// The group of each lane of a vector.
template <class Format>
constexpr int gguf_group(int vector, int lane) {
  return Format::word(vector, lane) / (Format::kGroup / 4);
}

inline __m512i gguf_low_halves(__m512i bytes) {
  return _mm512_and_si512(bytes, _mm512_set1_epi8(15));
}

// (bytes & 15) | high
inline __m512i gguf_join(__m512i bytes, __m512i high) {
  return _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi8(15), high, 0xea);
}

// The low and the high halves of bytes.
inline void gguf_split(__m512i bytes, __m512i& low, __m512i& high) {
  low = gguf_low_halves(bytes);
  high = gguf_low_halves(_mm512_srli_epi16(bytes, 4));
}

// The order of GgufGroupsOfHalves: which halves a vector has, and the swap of its second one.
inline bool gguf_is_high(int vector, int lane) {
  return (lane / 2 % 2 != 0) != (vector % 2 != 0);
}
inline __m512i gguf_shift_halves(__m512i bytes, int vector) {
  const u32v shifts = gguf_lanes([=](int lane) { return gguf_is_high(vector, lane) ? 4 : 0; });
  return _mm512_srlv_epi32(bytes, bits_as<__m512i>(shifts));
}
inline __m512i gguf_swap_eights(__m512i bytes) {
  return _mm512_shuffle_epi32(bytes, static_cast<_MM_PERM_ENUM>(0x4e));
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

struct GgufQ4K : GgufGroupsOfHalves {
  static constexpr GgufKind kKind = GgufKind::kQ4K;
  static constexpr bool kMins = true;
  static constexpr int kGroup = 32, kOffset = 0, kMost = 15;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    unroll<2>([&](auto p) __attribute__((always_inline)) {
      const __m512i bytes = _mm512_loadu_si512(from + 16 + 64 * p.value);
      codes[2 * p.value] = gguf_low_halves(gguf_shift_halves(bytes, 0));
      codes[2 * p.value + 1] = gguf_swap_eights(gguf_low_halves(gguf_shift_halves(bytes, 1)));
    });
    return gguf_scales_and_mins(from);
  }

  // Codes of odd groups, the high halves, are 16 times themselves, which saves the shifts.
  MLX_ANVIL_UNROLLED static f32v load_unshifted(const uint8_t* from, GgufCodes& codes) {
    const __m512i first = bits_as<__m512i>(
        gguf_lanes([](int lane) { return gguf_is_high(0, lane) ? 0xf0f0f0f0u : 0x0f0f0f0fu; }));
    unroll<2>([&](auto p) __attribute__((always_inline)) {
      const __m512i bytes = _mm512_loadu_si512(from + 16 + 64 * p.value);
      codes[2 * p.value] = _mm512_and_si512(bytes, first);
      codes[2 * p.value + 1] = gguf_swap_eights(_mm512_andnot_si512(first, bytes));
    });
    return gguf_scales_and_mins(from);
  }
};

struct GgufQ5K : GgufGroupsOfHalves {
  static constexpr GgufKind kKind = GgufKind::kQ5K;
  static constexpr bool kMins = true;
  static constexpr int kGroup = 32, kOffset = 0, kMost = 31;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    const __m512i high = gguf_twice(from + 16);
    unroll<kGgufVectors>([&](auto v) __attribute__((always_inline)) {
      // Rotates the bit of the group to bit 4.
      const u32v turns = gguf_lanes([=](int lane) {
        const int run = 2 * (v.value / 2) + lane / 8;
        return (32 + 4 - 2 * run - (gguf_is_high(v.value, lane) ? 1 : 0)) % 32;
      });
      const __m512i top =
          _mm512_and_si512(_mm512_rolv_epi32(high, bits_as<__m512i>(turns)), _mm512_set1_epi8(16));
      const __m512i bytes = _mm512_loadu_si512(from + 48 + 64 * (v.value / 2));
      const __m512i joined = gguf_join(gguf_shift_halves(bytes, v.value), top);
      codes[v.value] = v.value % 2 == 0 ? joined : gguf_swap_eights(joined);
    });
    return gguf_scales_and_mins(from);
  }
};

struct GgufQ6K : GgufNatural {
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

struct GgufIq4Xs : GgufHalvesOfGroups {
  static constexpr GgufKind kKind = GgufKind::kIq4Xs;
  static constexpr bool kMins = false;
  static constexpr int kGroup = 32, kOffset = 128, kMost = 128;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    unroll<2>([&](auto p) __attribute__((always_inline)) {
      const __m512i bytes = _mm512_loadu_si512(from + 8 + 64 * p.value);
      gguf_split(bytes, codes[2 * p.value], codes[2 * p.value + 1]);
    });
    for (__m512i& own : codes) {
      own = gguf_iq4_bytes(own);
    }
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

// Puts the scales of kVectors vectors of short blocks into lanes: kEach of each, kWords words
// apart.
template <int kEach, int kWords, int kVectors>
inline f32v gguf_scales_of_blocks(const __m512i (&vectors)[kVectors]) {
  __m512i halves = _mm512_setzero_si512();
  unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
    const __m512i order = bits_as<__m512i>(gguf_lanes([](int lane) {
      return 2 * lane % kEach * kWords + ((2 * lane + 1) % kEach * kWords << 16);
    }));
    constexpr __mmask32 kOwn = ((1u << kEach) - 1) << (kEach * v.value);
    halves = _mm512_mask_permutexvar_epi16(halves, kOwn, order, vectors[v.value]);
  });
  return bits_as<f32v>(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
}

// Codes of blocks of 18 bytes, four of which are 72.
MLX_ANVIL_UNROLLED f32v gguf_load_short(const uint8_t* from, GgufCodes& codes) {
  constexpr int kRead = 8;  // from here on, a vector has the whole fourth block
  const __m512i order = bits_as<__m512i>(gguf_lanes([](int lane) {
    const int block = lane / 4, first = 18 * block + 2 + lane % 4 * 4;
    return static_cast<uint32_t>(first - (block == 3 ? kRead : 0)) * 0x01010101u + 0x03020100u;
  }));
  __m512i blocks[2];
  unroll<2>([&](auto p) __attribute__((always_inline)) {
    blocks[p.value] = _mm512_loadu_si512(from + 72 * p.value);
    const __m512i last = _mm512_loadu_si512(from + 72 * p.value + kRead);
    const __m512i bytes = _mm512_mask_permutexvar_epi8(
        _mm512_permutexvar_epi8(order, blocks[p.value]), uint64_t{0xffff} << 48, order, last);
    gguf_split(bytes, codes[2 * p.value], codes[2 * p.value + 1]);
  });
  return gguf_scales_of_blocks<4, 9>(blocks);
}

struct GgufQ4_0 : GgufHalvesOfGroups {
  static constexpr GgufKind kKind = GgufKind::kQ4_0;
  static constexpr bool kMins = false;
  static constexpr int kGroup = 32, kOffset = 8, kMost = 8;

  MLX_ANVIL_UNROLLED static f32v load(const uint8_t* from, GgufCodes& codes) {
    return gguf_load_short(from, codes);
  }
};

struct GgufIq4Nl : GgufHalvesOfGroups {
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

struct GgufQ8_0 : GgufNatural {
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
    return gguf_scales_of_blocks<2, 17>(pairs);
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

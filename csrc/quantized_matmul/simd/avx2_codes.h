// Codes as bytes and words, for the integer products of AVX2. For kernel files only, and only where
// entries.h defines MLX_ANVIL_AVX2_PRODUCTS.
//
// A run of a row of w is one vector: each lane of 32 bits has kLaneColumns consecutive codes.
// words() and bytes() split it into vectors of 16-bit or 8-bit codes, which stay in their lanes:
// element i of a lane of vector v, of kVectors, is the lane's code i * kVectors + v. So a lane may
// also belong to a row of its own, which is how panels have it.
//
//   value of a code = word * kFactor = (byte - kByteOffset) * kFactor
//
// vpmaddubsw adds two products of unsigned and signed bytes, and saturates at 16 bits. Two products
// of an 8-bit code would not fit. Such codes are multiplied as words.
#pragma once

#include "quantized_matmul/simd/int_parts.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// 2, 4 and 8 bits.
template <int kBits_>
struct Avx2Affine {
  static constexpr int kBits = kBits_, kLaneColumns = 32 / kBits;
  static constexpr bool kHasBiases = true;
  static constexpr int kLargestByte = (1 << kBits) - 1, kByteOffset = 0;
  static constexpr int32_t kOffset = 0;
  static constexpr float kFactor = 1.0f;

  MLX_ANVIL_UNROLLED static __m256i load(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  // Zeros follow the first `columns` codes.
  MLX_ANVIL_UNROLLED static __m256i load_some(const uint8_t* from, int64_t columns) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i count = _mm256_set1_epi32(static_cast<int>(columns / kLaneColumns));
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(from),
                                 _mm256_cmpgt_epi32(count, lanes));
  }

  template <int kVector>
  MLX_ANVIL_UNROLLED static __m256i bytes(__m256i run) {
    return _mm256_and_si256(_mm256_srli_epi16(run, kBits * kVector),
                            _mm256_set1_epi8((1 << kBits) - 1));
  }
  template <int kVector>
  MLX_ANVIL_UNROLLED static __m256i words(__m256i run) {
    constexpr int kShift = kBits * kVector;
    const __m256i shifted = _mm256_srli_epi16(run, kShift);
    return kShift + kBits == 16 ? shifted
                                : _mm256_and_si256(shifted, _mm256_set1_epi16((1 << kBits) - 1));
  }
};

// 3, 5 and 6 bits. Bytes are moved so that each 16-bit word has the bits of two codes, and a
// multiplication shifts these to the word's top.
template <int kBits_>
struct Avx2Straddling {
  static constexpr int kBits = kBits_, kLaneColumns = 4;
  static constexpr bool kHasBiases = true;
  static constexpr int kLargestByte = (1 << kBits) - 1, kByteOffset = 0;
  static constexpr int32_t kOffset = 0;
  static constexpr float kFactor = 1.0f;

  MLX_ANVIL_UNROLLED static __m256i load(const uint8_t* from) {
    __m256i bytes;
    if constexpr (kLoaded == 8) {
      bytes = _mm256_setr_m128i(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)),
                                _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + kSecond)));
    } else {
      bytes = _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(from + kSecond),
                                  reinterpret_cast<const __m128i*>(from));
    }
    const auto* const places = reinterpret_cast<const __m256i*>(kPairs.places);
    const auto* const powers = reinterpret_cast<const __m256i*>(kPairs.powers);
    return _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, _mm256_load_si256(places)),
                              _mm256_load_si256(powers));
  }
  // Groups are whole runs.
  MLX_ANVIL_UNROLLED static __m256i load_some(const uint8_t* from, int64_t) { return load(from); }

  template <int kVector>
  MLX_ANVIL_UNROLLED static __m256i bytes(__m256i run) {
    static_assert(kVector == 0);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(run, 8 - kBits),
                                         _mm256_set1_epi16(((1 << kBits) - 1) << 8));
    return _mm256_or_si256(words<0>(run), odd);
  }
  template <int kVector>
  MLX_ANVIL_UNROLLED static __m256i words(__m256i run) {
    if constexpr (kVector == 0) {
      return _mm256_and_si256(_mm256_srli_epi16(run, 16 - 2 * kBits),
                              _mm256_set1_epi16((1 << kBits) - 1));
    } else {
      return _mm256_srli_epi16(run, 16 - kBits);
    }
  }

 private:
  // Each half of a vector has its half of the run: the second load ends where the run does.
  static constexpr int kLoaded = kBits == 3 ? 8 : 16, kSecond = 4 * kBits - kLoaded;

  struct Pairs {
    alignas(32) uint8_t places[32];
    alignas(32) uint16_t powers[16];
  };
  static constexpr Pairs kPairs = [] {
    Pairs pairs{};
    for (int i = 0; i < 16; ++i) {
      const int bit = 2 * kBits * (i % 8), first = i < 8 ? 0 : 2 * kBits - kSecond;
      pairs.places[2 * i] = static_cast<uint8_t>(first + bit / 8);
      pairs.places[2 * i + 1] = static_cast<uint8_t>(first + bit / 8 + 1);
      pairs.powers[i] = static_cast<uint16_t>(1 << (16 - 2 * kBits - bit % 8));
    }
    return pairs;
  }();
};

template <>
struct Avx2Affine<3> : Avx2Straddling<3> {};
template <>
struct Avx2Affine<5> : Avx2Straddling<5> {};
template <>
struct Avx2Affine<6> : Avx2Straddling<6> {};

// Twice the value of an e2m1 is an integer. Words are signed.
struct Avx2E2m1 : Avx2Affine<4> {
  static constexpr bool kHasBiases = false;
  static constexpr int kLargestByte = 24, kByteOffset = 12;
  static constexpr float kFactor = 0.5f;

  template <int kVector>
  MLX_ANVIL_UNROLLED static __m256i bytes(__m256i run) {
    return _mm256_shuffle_epi8(
        table(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)),
        Avx2Affine<4>::bytes<kVector>(run));
  }
  template <int kVector>
  MLX_ANVIL_UNROLLED static __m256i words(__m256i run) {
    const __m256i pairs = _mm256_shuffle_epi8(
        table(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
        Avx2Affine<4>::bytes<kVector % 2>(run));
    return _mm256_srai_epi16(kVector < 2 ? _mm256_slli_epi16(pairs, 8) : pairs, 8);
  }

 private:
  static __m256i table(__m128i numbers) { return _mm256_broadcastsi128_si256(numbers); }
};

template <class Action>
inline void with_avx2_format(const QuantizedFormat& format, Action action) {
  if (!format.has_biases()) {
    return action(Avx2E2m1());
  }
  switch (format.bits) {
    case 2:
      return action(Avx2Affine<2>());
    case 3:
      return action(Avx2Affine<3>());
    case 4:
      return action(Avx2Affine<4>());
    case 5:
      return action(Avx2Affine<5>());
    case 6:
      return action(Avx2Affine<6>());
    default:
      return action(Avx2Affine<8>());
  }
}

// ---- elements -----------------------------------------------------------------------------------

// How codes are multiplied by x of kPieces bytes: as words, or as bytes where one piece allows it.
template <class Format_, int kPieces_, bool kBytesOfOnePiece>
struct Avx2Elements {
  using Format = Format_;
  static constexpr int kPieces = kPieces_;
  static constexpr bool kWords = kPieces > 1 || !kBytesOfOnePiece;
  static constexpr int kPerLane = kWords ? 2 : 4;
  static constexpr int kVectors = Format::kLaneColumns / kPerLane;
  static constexpr int64_t kRunColumns = kLanes * Format::kLaneColumns;
  static constexpr int64_t kRunBytes = kRunColumns * Format::kBits / 8;
  static constexpr int32_t kOffset = kWords ? 0 : Format::kByteOffset;

  template <int kVector>
  MLX_ANVIL_UNROLLED static __m256i vector(__m256i run) {
    if constexpr (kWords) {
      return Format::template words<kVector>(run);
    } else {
      return Format::template bytes<kVector>(run);
    }
  }

  // The lane's code that is element i of vector v.
  static constexpr int code(int v, int i) { return i * kVectors + v; }
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// One float32 SIMD vector type per instruction set, with loads and stores that convert from and to
// the 16-bit formats. Uses the compilers' vector extension, and intrinsics only for instructions
// that it cannot express (float16 conversion, streaming stores, scaling by powers of two).
//
// For kernel files only. They are compiled once per instruction set, into the namespace
// MLX_ANVIL_ISA_NAMESPACE (see isa.h).
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "common/simd/half_types.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef MLX_ANVIL_ISA_NAMESPACE
#error "compile kernel files through the per-ISA object libraries (CMakeLists.txt)"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float f32v __attribute__((vector_size(4 * kLanes)));
typedef int32_t i32v __attribute__((vector_size(4 * kLanes)));
typedef uint32_t u32v __attribute__((vector_size(4 * kLanes)));
typedef uint16_t u16v __attribute__((vector_size(2 * kLanes)));
typedef uint8_t u8v __attribute__((vector_size(kLanes)));

// The number of vector registers, which bounds a register tile.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kRegisters = 32;
#else
inline constexpr int kRegisters = 16;
#endif

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Copies the bits: adding x to a vector of zeros would be a real addition, because of -0.
inline f32v splat(float x) {
  return bits_as<f32v>(u32v{} + bits_as<uint32_t>(x));
}

// Comparisons with NaN are false, so NaN in `x` passes through both functions.
inline f32v at_least(f32v x, float low) {
  return x < splat(low) ? splat(low) : x;
}
inline f32v at_most(f32v x, float high) {
  return x > splat(high) ? splat(high) : x;
}

inline f32v absolute(f32v x) {
  return bits_as<f32v>(bits_as<u32v>(x) & 0x7fffffffu);
}

// Pairwise; the order depends only on the number of lanes.
inline float lane_sum(f32v x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof(x));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] += lanes[i + width];
    }
  }
  return lanes[0];
}

// ---- conversion ---------------------------------------------------------------------------------

// Rounds to bfloat16 in the upper half of each lane: to nearest, ties to even; NaN becomes quiet.
inline u32v round_to_bf16(f32v x) {
  const u32v bits = bits_as<u32v>(x);
  const u32v rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x == x ? rounded : bits | 0x400000u;
}

#if defined(__AVX512F__)

inline f32v widen(f16, u16v bits) {
  return bits_as<f32v>(_mm512_cvtph_ps(bits_as<__m256i>(bits)));
}
inline u16v narrow(f16, f32v x) {
  return bits_as<u16v>(_mm512_cvtps_ph(bits_as<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__F16C__)

inline f32v widen(f16, u16v bits) {
  return bits_as<f32v>(_mm256_cvtph_ps(bits_as<__m128i>(bits)));
}
inline u16v narrow(f16, f32v x) {
  return bits_as<u16v>(_mm256_cvtps_ph(bits_as<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__aarch64__)

inline f32v widen(f16, u16v bits) {
  return bits_as<f32v>(vcvt_f32_f16(bits_as<float16x4_t>(bits)));
}
inline u16v narrow(f16, f32v x) {
  return bits_as<u16v>(vcvt_f16_f32(bits_as<float32x4_t>(x)));
}

#else

// A shifted half has an exponent that is too small by 112. Multiplying by 2^112 corrects normal and
// subnormal numbers alike. Infinity and NaN need their all-ones exponent restored.
inline f32v widen(f16, u16v bits) {
  const u32v wide = __builtin_convertvector(bits, u32v);
  const u32v magnitude = (wide & 0x7fffu) << 13;
  const u32v finite = bits_as<u32v>(bits_as<f32v>(magnitude) * 0x1p112f);
  const u32v special = magnitude | 0x7f800000u;
  const u32v value = magnitude >= (0x7c00u << 13) ? special : finite;
  return bits_as<f32v>(value | ((wide & 0x8000u) << 16));
}

// Rounds to nearest, ties to even. Below half's normal range, adding 0.5 makes the float adder
// round at half's smallest step, 2^-24.
inline u16v narrow(f16, f32v x) {
  const u32v bits = bits_as<u32v>(x);
  const u32v magnitude = bits & 0x7fffffffu;
  const u32v rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  const u32v normal = (rounded - (112u << 23)) >> 13;
  const u32v subnormal = bits_as<u32v>(bits_as<f32v>(magnitude) + 0.5f) - 0x3f000000u;
  const u32v infinity = u32v{} + 0x7c00u;
  const u32v nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
  u32v value = magnitude < 0x38800000u ? subnormal : normal;
  value = magnitude >= 0x47800000u ? infinity : value;
  value = magnitude > 0x7f800000u ? nan : value;
  return __builtin_convertvector(value | ((bits >> 16) & 0x8000u), u16v);
}

#endif

// ---- one vector, in memory order ----------------------------------------------------------------

template <class V, class T>
inline V load_bits(const T* from) {
  V bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bits;
}

// Replaces __builtin_convertvector: GCC 12 splits wide vectors in two, and scalarises vectors of
// bytes.
inline u32v zero_extend(u8v x) {
#if defined(__AVX512F__)
  return bits_as<u32v>(_mm512_cvtepu8_epi32(bits_as<__m128i>(x)));
#elif defined(__AVX2__)
  return bits_as<u32v>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_as<long long>(x))));
#else
  return __builtin_convertvector(x, u32v);
#endif
}
inline u32v zero_extend(u16v x) {
#if defined(__AVX512F__)
  return bits_as<u32v>(_mm512_cvtepu16_epi32(bits_as<__m256i>(x)));
#elif defined(__AVX2__)
  return bits_as<u32v>(_mm256_cvtepu16_epi32(bits_as<__m128i>(x)));
#else
  return __builtin_convertvector(x, u32v);
#endif
}
inline u16v truncate(u32v x) {
#if defined(__AVX512F__)
  return bits_as<u16v>(_mm512_cvtepi32_epi16(bits_as<__m512i>(x)));
#else
  return __builtin_convertvector(x, u16v);
#endif
}

inline f32v load_lanes(const float* from) {
  return load_bits<f32v>(from);
}
inline f32v load_lanes(const f16* from) {
  return widen(f16{}, load_bits<u16v>(from));
}
inline f32v load_lanes(const bf16* from) {
  return bits_as<f32v>(zero_extend(load_bits<u16v>(from)) << 16);
}

inline void store_lanes(float* to, f32v x) {
  std::memcpy(to, &x, sizeof(x));
}
inline void store_lanes(f16* to, f32v x) {
  const u16v bits = narrow(f16{}, x);
  std::memcpy(to, &bits, sizeof(bits));
}
inline void store_lanes(bf16* to, f32v x) {
#if defined(__AVX512BF16__)
  // Rounds as bf16_pairs() does.
  const u16v bits = bits_as<u16v>(_mm512_cvtneps_pbh(bits_as<__m512>(x)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const u16v bits = bits_as<u16v>(vcvt_bf16_f32(bits_as<float32x4_t>(x)));
#else
  const u16v bits = truncate(round_to_bf16(x) >> 16);
#endif
  std::memcpy(to, &bits, sizeof(bits));
}

// ---- streaming stores ---------------------------------------------------------------------------

template <class V>
inline void stream_bits(void* to, V bits) {
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16) {
    _mm_stream_si128(static_cast<__m128i*>(to), bits_as<__m128i>(bits));
    return;
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(to), bits_as<__m256i>(bits));
    return;
  }
#endif
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    _mm512_stream_si512(static_cast<__m512i*>(to), bits_as<__m512i>(bits));
    return;
  }
#endif
  std::memcpy(to, &bits, sizeof(bits));  // no streaming store of this size
}

// Orders streaming stores before any signal to another thread that they are done.
inline void finish_streaming() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_sfence();
#endif
}

// ---- transposes, and sums of lanes --------------------------------------------------------------

// Result lane l is a[l] where bit kBit of l is clear, else b[l - kBit]. `b` gets the other halves.
template <int kBit, class V, int... kLane>
inline void exchange(V& a, V& b, std::integer_sequence<int, kLane...>) {
  const V low =
      __builtin_shufflevector(a, b, ((kLane & kBit) == 0 ? kLane : kLanes + kLane - kBit)...);
  const V high =
      __builtin_shufflevector(a, b, ((kLane & kBit) == 0 ? kLane + kBit : kLanes + kLane)...);
  a = low;
  b = high;
}

template <int kBit = kLanes / 2, class V>
inline void transpose(V (&x)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if ((i & kBit) == 0) {
      exchange<kBit>(x[i], x[i + kBit], std::make_integer_sequence<int, kLanes>());
    }
  }
  if constexpr (kBit > 1) {
    transpose<kBit / 2>(x);
  }
}

// Lane l of the result is the sum of the lanes of x[l].
template <int kBit = kLanes / 2>
inline f32v lane_sums(f32v (&x)[kLanes]) {
  for (int i = 0; i < kBit; ++i) {
    exchange<kBit>(x[i], x[i + kBit], std::make_integer_sequence<int, kLanes>());
    x[i] += x[i + kBit];
  }
  if constexpr (kBit > 1) {
    return lane_sums<kBit / 2>(x);
  } else {
    return x[0];
  }
}

// ---- blocks -------------------------------------------------------------------------------------

// Two vectors of adjacent elements, in the order that is cheapest for the format. All operands of
// one dtype use the same order. bfloat16 is split into even and odd elements: a shift and a mask
// separate the halves of each 32-bit word.

inline constexpr int kBlock = 2 * kLanes;

struct Block {
  f32v first;
  f32v second;
};

inline Block load_block(const float* from) {
  return {load_bits<f32v>(from), load_bits<f32v>(from + kLanes)};
}

inline Block load_block(const f16* from) {
  return {widen(f16{}, load_bits<u16v>(from)), widen(f16{}, load_bits<u16v>(from + kLanes))};
}

inline Block load_block(const bf16* from) {
  const u32v pairs = load_bits<u32v>(from);
  return {bits_as<f32v>(pairs << 16), bits_as<f32v>(pairs & 0xffff0000u)};
}

// kStream selects a streaming store, which does not read the overwritten line first. It requires an
// address aligned to the vector.
template <bool kStream, class V>
inline void store_bits(void* to, V bits) {
  if constexpr (kStream) {
    stream_bits(to, bits);
  } else {
    std::memcpy(to, &bits, sizeof(bits));
  }
}

template <bool kStream>
inline void store_block(float* to, Block x) {
  store_bits<kStream>(to, x.first);
  store_bits<kStream>(to + kLanes, x.second);
}

template <bool kStream>
inline void store_block(f16* to, Block x) {
  store_bits<kStream>(to, narrow(f16{}, x.first));
  store_bits<kStream>(to + kLanes, narrow(f16{}, x.second));
}

// Packs pairs of bfloat16: the lower half of lane l is low[l], the upper half is high[l].
inline u32v bf16_pairs(f32v low, f32v high) {
#if defined(__AVX512BF16__)
  // The instruction flushes subnormals to zero, which the other builds keep.
  const __m512i halves =
      bits_as<__m512i>(_mm512_cvtne2ps_pbh(bits_as<__m512>(high), bits_as<__m512>(low)));
  // Interleaves the rows of lower and upper halves.
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return bits_as<u32v>(_mm512_permutexvar_epi16(order, halves));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x4_t lower = vcvt_bf16_f32(bits_as<float32x4_t>(low));
  const uint16x4_t upper = bits_as<uint16x4_t>(vcvt_bf16_f32(bits_as<float32x4_t>(high)));
  const uint16x4_t halves = bits_as<uint16x4_t>(lower);
  return bits_as<u32v>(vcombine_u16(vzip1_u16(halves, upper), vzip2_u16(halves, upper)));
#else
  return (round_to_bf16(low) >> 16) | (round_to_bf16(high) & 0xffff0000u);
#endif
}

template <bool kStream>
inline void store_block(bf16* to, Block x) {
  store_bits<kStream>(to, bf16_pairs(x.first, x.second));
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

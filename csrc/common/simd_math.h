// Vectorised elementary functions. Kernel files only (see simd.h).
#pragma once

#include "common/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// How exact a function has to be: for a float32 result, or for one that is rounded to 16 bits next.
enum class Accuracy { kFloat, kHalf };

template <class T>
inline constexpr Accuracy kAccuracyFor = sizeof(T) == 4 ? Accuracy::kFloat : Accuracy::kHalf;

// e^x = 2^n e^r with whole n and |r| <= ln2 / 2.
struct ExpParts {
  f32v mantissa;  // e^r
  f32v shifted;   // n + 1.5 * 2^23, so that the lowest bits of its representation are n
  f32v n;
};

// For kFloat, ln2 is split in two so that n times its upper part is exact, and e^r is a polynomial
// of degree 6 (error 7e-8, rounding included). For kHalf, ln2 stays whole and degree 4 does (2.9e-6
// in all). Both polynomials minimise the largest relative error among those that are 1 at 0.
template <Accuracy kAccuracy>
inline ExpParts exp_parts(f32v x) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  ExpParts parts;
  parts.shifted = x * kLog2E + kRound;
  parts.n = parts.shifted - kRound;
  if constexpr (kAccuracy == Accuracy::kHalf) {
    const f32v r = x - parts.n * 0.69314718055994531f;
    f32v p = r * 4.151380807e-2f + 1.678749621e-1f;
    p = p * r + 5.000301600e-1f;
    p = p * r + 9.999668002e-1f;
    parts.mantissa = p * r + 1.0f;
  } else {
    const f32v r = (x - parts.n * 0.693359375f) - parts.n * -2.12194440e-4f;
    f32v p = r * 1.384774572e-3f + 8.374293335e-3f;
    p = p * r + 4.166793823e-2f;
    p = p * r + 1.666642874e-1f;
    p = p * r + 4.999999404e-1f;
    p = p * r + 1.0f;
    parts.mantissa = p * r + 1.0f;
  }
  return parts;
}

// e^x for every float, with an error below 1.4 ulp (1.1 with fused multiply-add), or below 1 unit
// of the smallest subnormal where the result is subnormal: +inf where e^x overflows, 0 where it
// underflows, NaN for NaN.
inline f32v exp(f32v x) {
  x = at_least(at_most(x, 89.5f), -105.0f);  // beyond: inf and 0, which scaling then produces
  const ExpParts parts = exp_parts<Accuracy::kFloat>(x);
  // 2^n in two factors, since 2^n itself may lie outside the range of float.
  const i32v n = __builtin_convertvector(parts.n, i32v);
  const i32v half = n >> 1;
  const f32v first = bits_as<f32v>((half + 127) << 23);
  const f32v second = bits_as<f32v>((n - half + 127) << 23);
  return parts.mantissa * first * second;
}

// e^x for x <= 0 and for NaN, which is what sigmoid and softmax need: cheaper, since nothing
// overflows. Accurate as `exp` (kFloat), or to a relative 2^-18 (kHalf; 2^-17 without fused
// multiply-add). Below -87.336 (results from 1.0006 * 2^-126 down) it is 0, as GPUs make of
// subnormal numbers. NaN gives 0 too: callers keep x itself as a factor.
template <Accuracy kAccuracy>
inline f32v exp_nonpositive(f32v x) {
  constexpr float kSmallestNormal = -87.336f;  // the logarithm of 2^-126, rounded up
  const ExpParts parts = exp_parts<kAccuracy>(x);
  const u32v scaled = bits_as<u32v>(parts.mantissa) + (bits_as<u32v>(parts.shifted) << 23);
  return bits_as<f32v>(x > splat(kSmallestNormal) ? scaled : u32v{});
}

struct Sigmoid {
  f32v value;       // s = 1 / (1 + e^-x)
  f32v complement;  // 1 - s, without the cancellation of that subtraction
};

// From e^-|x|, which never overflows: both parts keep full relative accuracy at both ends. A NaN
// does not pass through.
template <Accuracy kAccuracy>
inline Sigmoid sigmoid(f32v x) {
  const f32v small = exp_nonpositive<kAccuracy>(-absolute(x));
  const f32v major = 1.0f / (1.0f + small);
  const f32v minor = small * major;
  const i32v negative = bits_as<i32v>(x) < 0;
  return {negative ? minor : major, negative ? major : minor};
}

// x sigmoid(x), with one division for all of it; NaN for NaN and for -inf, as that product gives.
template <Accuracy kAccuracy>
inline f32v silu(f32v x) {
  const f32v small = exp_nonpositive<kAccuracy>(-absolute(x));
  return (bits_as<i32v>(x) < 0 ? x * small : x) / (1.0f + small);
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

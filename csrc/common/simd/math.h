// Vectorised elementary functions. For kernel files only (see simd.h).
#pragma once

#include "common/simd/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// The accuracy of a function: that of the format to which the result is rounded next.
enum class Accuracy { kFloat32, kFloat16, kBfloat16 };

template <class T>
inline constexpr Accuracy kAccuracyOf = Accuracy::kFloat32;
template <>
inline constexpr Accuracy kAccuracyOf<f16> = Accuracy::kFloat16;
template <>
inline constexpr Accuracy kAccuracyOf<bf16> = Accuracy::kBfloat16;

// e^r for |r| <= ln2 / 2. Polynomials of degree 6, 4 and 3 with relative errors of 7e-8 (including
// rounding), 2.9e-6 and 1.1e-4. Each minimises the largest relative error among polynomials that
// are 1 at 0.
template <Accuracy kAccuracy>
inline f32v exp_of_remainder(f32v r) {
  f32v p;
  if constexpr (kAccuracy == Accuracy::kFloat32) {
    p = r * 1.384774572e-3f + 8.374293335e-3f;
    p = p * r + 4.166793823e-2f;
    p = p * r + 1.666642874e-1f;
    p = p * r + 4.999999404e-1f;
    p = p * r + 1.0f;
  } else if constexpr (kAccuracy == Accuracy::kFloat16) {
    p = r * 4.151380807e-2f + 1.678749621e-1f;
    p = p * r + 5.000301600e-1f;
    p = p * r + 9.999668002e-1f;
  } else {
    p = r * 1.651794612e-01f + 5.041311979e-01f;
    p = p * r + 1.000195861e+00f;
  }
  return p * r + 1.0f;
}

inline constexpr float kRoundToWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// e^x = 2^n e^r with integer n and |r| <= ln2 / 2.
struct ExpParts {
  f32v mantissa;  // e^r
  f32v shifted;   // n + kRoundToWhole: the low bits of its representation are n
  f32v n;
};

// For kFloat32, ln2 is split in two so that n times the upper part is exact.
template <Accuracy kAccuracy>
inline ExpParts exp_parts(f32v x) {
  constexpr float kLog2E = 1.44269504088896341f;
  ExpParts parts;
  parts.shifted = x * kLog2E + kRoundToWhole;
  parts.n = parts.shifted - kRoundToWhole;
  f32v r;
  if constexpr (kAccuracy == Accuracy::kFloat32) {
    r = (x - parts.n * 0.693359375f) - parts.n * -2.12194440e-4f;
  } else {
    r = x - parts.n * 0.69314718055994531f;
  }
  parts.mantissa = exp_of_remainder<kAccuracy>(r);
  return parts;
}

// e^x for every float: +inf on overflow, 0 on underflow, NaN for NaN. The error is below 1.4 ulp
// (1.1 with FMA), or below one unit of the smallest subnormal if the result is subnormal.
inline f32v exp(f32v x) {
  x = at_least(at_most(x, 89.5f), -105.0f);  // beyond, scaling produces inf and 0
  const ExpParts parts = exp_parts<Accuracy::kFloat32>(x);
  // 2^n as two factors, because 2^n itself can lie outside the range of float.
  const i32v n = __builtin_convertvector(parts.n, i32v);
  const i32v half = n >> 1;
  const f32v first = bits_as<f32v>((half + 127) << 23);
  const f32v second = bits_as<f32v>((n - half + 127) << 23);
  return parts.mantissa * first * second;
}

// e^x for x <= 0, cheaper than exp(): nothing overflows. Relative error: as exp() (kFloat32), 2^-18
// (kFloat16; 2^-17 without FMA) or 2^-13 (kBfloat16). x < -87.336 (1.0006 * 2^-126) gives 0, as
// GPUs flush subnormals. NaN gives 0 too: callers also multiply by x itself.
template <Accuracy kAccuracy>
inline f32v exp_nonpositive(f32v x) {
  constexpr float kSmallestNormal = -87.336f;  // the logarithm of 2^-126, rounded up
  const ExpParts parts = exp_parts<kAccuracy>(x);
  const u32v scaled = bits_as<u32v>(parts.mantissa) + (bits_as<u32v>(parts.shifted) << 23);
  return bits_as<f32v>(x > splat(kSmallestNormal) ? scaled : u32v{});
}

// 2^x for x < 127, -inf and NaN, as a softmax in the log2 domain needs it. The relative error is
// that of exp_of_remainder() plus 4e-8. Results below 2^-126 are 0, or correct subnormals with
// AVX-512. NaN stays NaN.
template <Accuracy kAccuracy>
inline f32v exp2_bounded(f32v x) {
  constexpr float kLn2 = 0.69314718055994531f;
#if defined(__AVX512F__)
  x = at_least(x, -151.0f);
  const f32v n = (x + kRoundToWhole) - kRoundToWhole;
  const f32v mantissa = exp_of_remainder<kAccuracy>((x - n) * kLn2);
  return bits_as<f32v>(_mm512_scalef_ps(bits_as<__m512>(mantissa), bits_as<__m512>(n)));
#else
  const f32v shifted = at_least(x, -126.0f) + kRoundToWhole;
  const f32v mantissa = exp_of_remainder<kAccuracy>((x - (shifted - kRoundToWhole)) * kLn2);
  // A product instead of an exponent addition, because it propagates NaN.
  const f32v scaled = mantissa * bits_as<f32v>((bits_as<u32v>(shifted) + 127u) << 23);
  return x < splat(-126.0f) ? f32v{} : scaled;
#endif
}

// tanh(x) with an absolute error of 2e-7; +-1 at +-inf, NaN for NaN.
inline f32v tanh(f32v x) {
  constexpr float kTwoLog2E = 2.88539008177792681f;
  const f32v small = exp2_bounded<Accuracy::kFloat32>(absolute(x) * -kTwoLog2E);
  const f32v magnitude = (1.0f - small) / (1.0f + small);
  return bits_as<f32v>(bits_as<u32v>(magnitude) | (bits_as<u32v>(x) & 0x80000000u));
}

struct Sigmoid {
  f32v value;       // s = 1 / (1 + e^-x)
  f32v complement;  // 1 - s
};

// Computes the smaller of s and 1 - s directly, because subtracting from 1 would cancel. NaN gives
// a number: callers also multiply by x itself.
template <Accuracy kAccuracy>
inline Sigmoid sigmoid(f32v x) {
  const f32v small = exp_nonpositive<kAccuracy>(-absolute(x));
  const f32v major = 1.0f / (1.0f + small);
  const f32v minor = small * major;
  const i32v negative = bits_as<i32v>(x) < 0;
  return {negative ? minor : major, negative ? major : minor};
}

// factor / (1 + e^-x). Uses e^-|x|, which never overflows and keeps full relative accuracy at both
// ends.
template <Accuracy kAccuracy>
inline f32v times_sigmoid(f32v factor, f32v x) {
  const f32v small = exp_nonpositive<kAccuracy>(-absolute(x));
  return (bits_as<i32v>(x) < 0 ? factor * small : factor) / (1.0f + small);
}

struct Silu {
  f32v value;       // x s with s = 1 / (1 + e^-x)
  f32v derivative;  // s (1 + x (1 - s))
};

#if defined(__AVX512F__)

// 2^(i / 32) and 2^(i / 16), scaled up by half the error of 1 + r against e^r at the ends of a
// step.
alignas(64) inline constexpr float kSteps32[32] = {
    1.00002932f, 1.02192712f, 1.04430441f, 1.06717169f, 1.09053971f, 1.11441942f, 1.13882203f,
    1.16375898f, 1.18924199f, 1.215283f,   1.24189423f, 1.26908817f, 1.29687758f, 1.32527551f,
    1.35429526f, 1.38395046f, 1.41425503f, 1.44522319f, 1.47686945f, 1.50920868f, 1.54225605f,
    1.57602706f, 1.61053756f, 1.64580374f, 1.68184215f, 1.7186697f,  1.75630366f, 1.7947617f,
    1.83406187f, 1.87422259f, 1.91526272f, 1.95720152f};
alignas(64) inline constexpr float kSteps16[16] = {
    1.0001173f,  1.04439627f, 1.09063565f, 1.13892221f, 1.18934661f, 1.24200348f,
    1.29699167f, 1.3544144f,  1.41437945f, 1.47699937f, 1.54239172f, 1.61067924f,
    1.6819901f,  1.75645817f, 1.83422321f, 1.91543121f};

// e^-x to a relative 2^-15 (kFloat16) or 2^-13 (kBfloat16). A permutation looks up 2^n in steps of
// 1/32 or 1/16, which leaves r so small that 1 + r replaces e^r. Silu is bound by the multipliers,
// and this uses them less than a polynomial. NaN gives a number: callers also multiply by x itself.
template <Accuracy kAccuracy>
inline f32v exp_of_negative(f32v x) {
  constexpr bool kFine = kAccuracy == Accuracy::kFloat16;
  constexpr float kLog2E = 1.44269504088896341f;
  // Adding it rounds to a whole number of steps. The low bits then count the steps.
  constexpr float kRound = kFine ? 393216.0f : 786432.0f;  // 1.5 * 2^18, 1.5 * 2^19
  if constexpr (!kFine) {
    // The range reduction works for every float16. Other formats need x clamped.
    constexpr int kSmallerMagnitude = 2;  // keeps the sign of the first operand
    x = bits_as<f32v>(
        _mm512_range_ps(bits_as<__m512>(x), _mm512_set1_ps(104.0f), kSmallerMagnitude));
  }
  const f32v shifted = kRound - x * kLog2E;
  const f32v n = shifted - kRound;
  const f32v r = -x - n * 0.69314718055994531f;
  const __m512i step = bits_as<__m512i>(shifted);
  const f32v root = bits_as<f32v>(
      kFine ? _mm512_permutex2var_ps(_mm512_load_ps(kSteps32), step, _mm512_load_ps(kSteps32 + 16))
            : _mm512_permutexvar_ps(step, _mm512_load_ps(kSteps16)));
  // Scales by 2^floor(n), also to infinity and zero. An infinite x makes the mantissa NaN, which
  // the instruction turns into zero or infinity according to the sign of n.
  return bits_as<f32v>(_mm512_scalef_ps(bits_as<__m512>(root * r + root), bits_as<__m512>(n)));
}

#endif

// NaN for NaN and for -inf (-inf * 0); finite for finite x.
template <Accuracy kAccuracy>
inline f32v silu(f32v x) {
#if defined(__AVX512F__)
  if constexpr (kAccuracy != Accuracy::kFloat32) {
    return x / (1.0f + exp_of_negative<kAccuracy>(x));
  }
#endif
  return times_sigmoid<kAccuracy>(x, x);
}

template <Accuracy kAccuracy>
inline Silu silu_with_derivative(f32v x) {
#if defined(__AVX512F__)
  if constexpr (kAccuracy != Accuracy::kFloat32) {
    const f32v sigmoid = 1.0f / (1.0f + exp_of_negative<kAccuracy>(x));
    const f32v value = x * sigmoid;
    return {value, value * (1.0f - sigmoid) + sigmoid};
  }
#endif
  const Sigmoid s = sigmoid<kAccuracy>(x);
  return {x * s.value, s.value * (1.0f + x * s.complement)};
}

// log(1 + t) / t for 0 <= t <= 1, from the series of artanh(z) / z with z = t / (2 + t). Relative
// error: 2e-7.
inline f32v log1p_ratio(f32v t) {
  const f32v z = t / (2.0f + t), square = z * z;
  f32v p = splat(1.0f / 13.0f);
  for (const float coefficient :
       {1.0f / 11.0f, 1.0f / 9.0f, 1.0f / 7.0f, 1.0f / 5.0f, 1.0f / 3.0f, 1.0f}) {
    p = p * square + coefficient;
  }
  return 2.0f / (2.0f + t) * p;
}

struct Softplus {
  f32v value;       // log(1 + e^x)
  f32v derivative;  // 1 / (1 + e^-x)
};

// For every float; NaN for NaN.
inline Softplus softplus_with_derivative(f32v x) {
  const f32v small = exp(-absolute(x));
  const f32v value = at_least(x, 0.0f) + small * log1p_ratio(small);
  return {value, (x < f32v{} ? small : splat(1.0f)) / (1.0f + small)};
}

inline f32v softplus(f32v x) {
  return softplus_with_derivative(x).value;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

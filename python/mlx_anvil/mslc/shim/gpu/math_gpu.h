// Transcendental functions of one float, for a target without a maths library.
//
// All of them satisfy MSL's bounds for precise:: functions. They use two hardware approximations
// (approx::exp2, approx::rsqrt), fused multiply-adds and minimax polynomials. A constant written as
// two floats (high, low) is accurate to 48 bits.
//
// This file computes rounding errors, so operations must not be fused unless they say so
// (multiply_add): a fused sum has another error. Code after this file may be fused again, which
// requires -ffp-contract=fast-honor-pragmas.
#pragma once

#pragma clang fp contract(off)

namespace mslc::target {

MSLC_INLINE uint bits_of(float x) {
  return __builtin_bit_cast(uint, x);
}
MSLC_INLINE float from_bits(uint bits) {
  return __builtin_bit_cast(float, bits);
}
MSLC_INLINE float multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
MSLC_INLINE float magnitude(float x) {
  return __builtin_fabsf(x);
}
MSLC_INLINE float with_sign_of(float x, float sign) {
  return __builtin_copysignf(x, sign);
}
MSLC_INLINE float infinity() {
  return __builtin_inff();
}
MSLC_INLINE float not_a_number() {
  return __builtin_nanf("");
}

// c[0] + x c[1] + x^2 c[2] + ...
template <class... C>
MSLC_INLINE float polynomial(float, float last) {
  return last;
}
template <class... C>
MSLC_INLINE float polynomial(float x, float first, C... rest) {
  return multiply_add(polynomial(x, rest...), x, first);
}

#if defined(__NVPTX__) || defined(__SPIRV__)
MSLC_INLINE half fma(half x, half y, half z) {
  return __builtin_fmaf16(x, y, z);
}
#endif
MSLC_INLINE float fma(float x, float y, float z) {
  return __builtin_fmaf(x, y, z);
}

MSLC_INLINE float sqrt(float x) {
  return __builtin_sqrtf(x);
}

#if defined(__SPIRV__)
// Apple's GPUs have no double.
MSLC_INLINE float rsqrt(float x) {
  return approx::rsqrt(x);
}
#else
// Correctly rounded: one third-order step from the approximation, in double, where x y is exact and
// the residual 1 - x y^2 is rounded once. The remaining error of about 2^-51 never crosses the
// midpoint between two floats (tests/mslc try every mantissa).
MSLC_INLINE float rsqrt(float x) {
  const float approximation = approx::rsqrt(x);
  const double y = approximation, product = x * y;
  const double residual = __builtin_fma(-product, y, 1.0);
  const double result = __builtin_fma(y * residual, __builtin_fma(0.375, residual, 0.5), y);
  const bool special = !(x > 0.0f) || x == infinity();
  return special ? approximation : static_cast<float>(result);
}
#endif

// ---- exponentials

// Returns 2^whole 2^fraction for |fraction| <= 1/2, as two factors so that neither leaves float's
// range.
MSLC_INLINE float scaled_exp2(float whole, float fraction) {
  // After adding 1.5 2^23, the last place of a float is 1, so its bits hold the integer. This
  // avoids a conversion.
  const int exponent = static_cast<int>(bits_of(whole + 0x1.8p23f) - bits_of(0x1.8p23f));
  const int half_of_it = exponent >> 1;
  const float first = from_bits(static_cast<uint>(half_of_it + 127) << 23);
  const float second = from_bits(static_cast<uint>(exponent - half_of_it + 127) << 23);
  return approx::exp2(fraction) * first * second;
}

// Returns base^x 2^shift, where (high, low) is the base-2 logarithm of the base.
MSLC_INLINE float scaled_power(float x, float high, float low, float limit, int shift) {
  const float bounded = __builtin_fmaxf(-limit, __builtin_fminf(x, limit));
  const float whole = __builtin_rintf(bounded * high);
  const float fraction = multiply_add(bounded, low, multiply_add(bounded, high, -whole));
  const float result = scaled_exp2(whole + static_cast<float>(shift), fraction);
  return x != x ? x : result;
}

MSLC_INLINE float scaled_exp(float x, int shift) {
  return scaled_power(x, 0x1.715476p+0f, 0x1.4ae0cp-26f, 105.0f, shift);
}
MSLC_INLINE float exp(float x) {
  return scaled_exp(x, 0);
}
MSLC_INLINE float exp2(float x) {
  return approx::exp2(x);
}
MSLC_INLINE float exp10(float x) {
  return scaled_power(x, 0x1.a934fp+1f, 0x1.2f346ep-24f, 46.0f, 0);
}

// ---- logarithms

// Returns log(1 + f) for |f| <= 1/3.
MSLC_INLINE float log_near_one(float f) {
  const float tail =
      polynomial(f, -0x1p-1f, 0x1.555558p-2f, -0x1.fffe28p-3f, 0x1.99968cp-3f, -0x1.55b1dp-3f,
                 0x1.250bb6p-3f, -0x1.f17202p-4f, 0x1.b6b0a2p-4f, -0x1.0af51cp-3f, 0x1.f220c2p-4f);
  return multiply_add(f * f, tail, f);
}

// x = mantissa 2^exponent with a mantissa in [2/3, 4/3).
struct Split {
  float mantissa, exponent;
};
MSLC_INLINE Split split(float x) {
  const bool subnormal = x < 0x1p-126f;
  const uint bits = bits_of(subnormal ? x * 0x1p24f : x);
  const uint exponent_bits = (bits - 0x3f2aaaabu) & 0xff800000u;
  const int exponent = static_cast<int>(exponent_bits) >> 23;
  return {from_bits(bits - exponent_bits), static_cast<float>(exponent - (subnormal ? 24 : 0))};
}

MSLC_INLINE bool has_logarithm(float x) {
  return x > 0.0f && x < infinity();
}
MSLC_INLINE float logarithm_of_special(float x) {
  return x == 0.0f ? -infinity() : x < 0.0f ? not_a_number() : x;
}

MSLC_INLINE float log(float x) {
  const Split s = split(x);
  const float low = multiply_add(s.exponent, -0x1.05c61p-29f, log_near_one(s.mantissa - 1.0f));
  const float result = multiply_add(s.exponent, 0x1.62e43p-1f, low);
  return has_logarithm(x) ? result : logarithm_of_special(x);
}
// exponent * (high, low) + log(mantissa) * (scale_high, scale_low)
MSLC_INLINE float scaled_log(float x, float high, float low, float scale_high, float scale_low) {
  const Split s = split(x);
  const float natural = log_near_one(s.mantissa - 1.0f);
  const float product = natural * scale_high;
  const float rest = multiply_add(natural, scale_high, -product) + natural * scale_low;
  const float result =
      multiply_add(s.exponent, high, product) + multiply_add(s.exponent, low, rest);
  return has_logarithm(x) ? result : logarithm_of_special(x);
}
MSLC_INLINE float log2(float x) {
  return scaled_log(x, 1.0f, 0.0f, 0x1.715476p+0f, 0x1.4ae0cp-26f);
}
MSLC_INLINE float log10(float x) {
  return scaled_log(x, 0x1.344136p-2f, -0x1.ec10cp-27f, 0x1.bcb7b2p-2f, -0x1.5b235ep-27f);
}
// Returns log(1 + x) for x > -1, accurate near 0.
MSLC_INLINE float log1p(float x) {
  const float sum = 1.0f + x;
  // The rounding error of the sum, relative to it. From 2^24 on, the 1 does not matter.
  const float lost = x < 0x1p24f ? (x - (sum - 1.0f)) / sum : 0.0f;
  return magnitude(x) <= 0x1.555554p-2f ? log_near_one(x) : log(sum) + lost;
}

// ---- powers

// Returns the base-2 logarithm of a positive finite x as an unevaluated sum, with a relative error
// of about 2^-31, also near 1. It uses log(m) = 2 atanh((m - 1) / (m + 1)) with the argument in two
// floats.
struct TwoFloats {
  float high, low;
};
MSLC_INLINE TwoFloats log2_in_two_floats(float x) {
  const Split s = split(x);
  const float sum = s.mantissa + 1.0f;
  const float sum_low = s.mantissa - (sum - 1.0f);
  const float numerator = 2.0f * (s.mantissa - 1.0f);
  const float u = numerator / sum;
  const float u_low = (multiply_add(-u, sum, numerator) - u * sum_low) / sum;
  // 2 atanh(u / 2) = u + u^3 / 12 + u^5 / 80 + ...
  const float square = u * u;
  const float series =
      square * polynomial(square, 1.0f / 12, 1.0f / 80, 1.0f / 448, 1.0f / 2304, 1.0f / 11264);
  const float correction = multiply_add(u, series, u_low);
  const float natural = u + correction;
  const float natural_low = correction - (natural - u);
  const float product = natural * 0x1.715476p+0f;
  const float product_low = multiply_add(natural, 0x1.715476p+0f, -product) +
                            multiply_add(natural, 0x1.4ae0cp-26f, natural_low * 0x1.715476p+0f);
  const float high = s.exponent + product;
  return {high, (product - (high - s.exponent)) + product_low};
}

// Returns x^y for x > 0. The logarithm is accurate enough for every y.
MSLC_INLINE float positive_power(float x, float y) {
  const TwoFloats l = log2_in_two_floats(x);
  const float product = y * l.high;
  const float low = multiply_add(y, l.high, -product) + y * l.low;
  const float bounded = product > 300.0f ? 300.0f : product < -300.0f ? -300.0f : product;
  const float whole = __builtin_rintf(bounded);
  const bool in_range = magnitude(product) <= 300.0f;
  return scaled_exp2(whole, (bounded - whole) + (in_range ? low : 0.0f));
}

MSLC_INLINE float pow(float x, float y) {
  if (y == 0.0f || x == 1.0f) return 1.0f;
  if (x != x || y != y) return x + y;
  const float size = magnitude(x);
  const bool whole = __builtin_truncf(y) == y;
  const bool odd = whole && magnitude(y) < 0x1p24f && (static_cast<int>(y) & 1) != 0;
  const bool negative = (bits_of(x) >> 31) != 0 && odd;
  float result;
  if (magnitude(y) == infinity()) {
    result = size == 1.0f ? 1.0f : (size > 1.0f) == (y > 0.0f) ? infinity() : 0.0f;
  } else if (size == 0.0f || size == infinity()) {
    result = (size == 0.0f) == (y > 0.0f) ? 0.0f : infinity();
  } else {
    if (x < 0.0f && !whole) return not_a_number();
    result = positive_power(size, y);
  }
  return negative ? -result : result;
}

// ---- hyperbolic functions

MSLC_INLINE float sinh(float x) {
  const float size = magnitude(x);
  const float square = x * x;
  const float small = multiply_add(
      x * square,
      polynomial(square, 0x1.555556p-3f, 0x1.111134p-7f, 0x1.9ffe92p-13f, 0x1.7a15b6p-19f), x);
  const float grown = scaled_exp(size, -1);
  return size < 1.0f ? small : with_sign_of(grown - 0.25f / grown, x);
}
MSLC_INLINE float cosh(float x) {
  const float grown = scaled_exp(magnitude(x), -1);
  return grown + 0.25f / grown;
}
MSLC_INLINE float tanh(float x) {
  const float size = magnitude(x);
  const float square = x * x;
  const float small =
      multiply_add(x * square,
                   polynomial(square, -0x1.555554p-2f, 0x1.11109cp-3f, -0x1.b9f9e4p-5f,
                              0x1.6411a2p-6f, -0x1.0ec0e8p-7f, 0x1.23e4c6p-9f),
                   x);
  const float large = 1.0f - 2.0f / (exp(2.0f * size) + 1.0f);
  return with_sign_of(size < 0.59375f ? small : large, x);
}
MSLC_INLINE float asinh(float x) {
  const float size = magnitude(x);
  const float square = size * size;
  const float near = log1p(size + square / (1.0f + sqrt(1.0f + square)));
  const float far = log(size) + 0x1.62e43p-1f;
  return with_sign_of(size < 0x1p13f ? near : far, x);
}
MSLC_INLINE float acosh(float x) {
  const float above = x - 1.0f;
  const float near = log1p(above + sqrt(multiply_add(above, above, 2.0f * above)));
  const float far = log(x) + 0x1.62e43p-1f;
  return !(x >= 1.0f) ? not_a_number() : x < 0x1p13f ? near : far;
}
MSLC_INLINE float atanh(float x) {
  const float size = magnitude(x);
  const float result = 0.5f * log1p(2.0f * size / (1.0f - size));
  return with_sign_of(size < 1.0f ? result : size == 1.0f ? infinity() : not_a_number(), x);
}

// ---- inverse trigonometric functions

MSLC_INLINE float arc_tail(float square) {
  return polynomial(square, 0x1.55554cp-3f, 0x1.33387cp-4f, 0x1.6caed2p-5f, 0x1.04919ep-5f,
                    0x1.d91fcap-7f, 0x1.3355b4p-5f);
}
MSLC_INLINE float small_asin(float x) {
  return multiply_add(x * x * x, arc_tail(x * x), x);
}
MSLC_INLINE float asin(float x) {
  const float size = magnitude(x);
  const float outer = multiply_add(-2.0f, small_asin(sqrt(0.5f - 0.5f * size)), 0x1.921fb6p+0f);
  return size <= 0.5f ? small_asin(x) : with_sign_of(outer, x);
}
MSLC_INLINE float acos(float x) {
  const float size = magnitude(x);
  const float outer = 2.0f * small_asin(sqrt(0.5f - 0.5f * size));
  if (size <= 0.5f) return 0x1.921fb6p+0f - (small_asin(x) + 0x1.777a5cp-25f);
  return x > 0.0f ? outer : 0x1.921fb6p+1f - (outer + 0x1.777a5cp-24f);
}
// 0 <= x <= 1
MSLC_INLINE float small_atan(float x) {
  const float square = x * x;
  const float tail = polynomial(square, -0x1.55553ep-2f, 0x1.9991fep-3f, -0x1.2421b4p-3f,
                                0x1.c099f2p-4f, -0x1.58346cp-4f, 0x1.dac964p-5f, -0x1.fed064p-6f,
                                0x1.65a54ep-7f, -0x1.d62e0cp-10f);
  return multiply_add(x * square, tail, x);
}
MSLC_INLINE float atan(float x) {
  const float size = magnitude(x);
  const float angle = small_atan(size > 1.0f ? 1.0f / size : size);
  return with_sign_of(size > 1.0f ? 0x1.921fb6p+0f - (angle + 0x1.777a5cp-25f) : angle, x);
}
MSLC_INLINE float atan2(float y, float x) {
  if (x != x || y != y) return x + y;
  const float across = magnitude(x), up = magnitude(y);
  const bool steep = up > across;
  float larger = steep ? up : across, smaller = steep ? across : up;
  if (larger > 0x1p126f && larger < infinity()) {  // keeps the division in range
    larger *= 0.25f;
    smaller *= 0.25f;
  }
  const float ratio = larger == 0.0f ? 0.0f : smaller == larger ? 1.0f : smaller / larger;
  float angle = small_atan(ratio);
  angle = steep ? 0x1.921fb6p+0f - (angle + 0x1.777a5cp-25f) : angle;
  angle = bits_of(x) >> 31 ? 0x1.921fb6p+1f - (angle + 0x1.777a5cp-24f) : angle;
  return with_sign_of(angle, y);
}

// ---- others

// Exact: long division of the mantissas, 32 bits of quotient per step.
MSLC_INLINE float fmod(float x, float y) {
  const float size = magnitude(x), divisor = magnitude(y);
  if (!(size < infinity()) || !(divisor > 0.0f)) return not_a_number();
  if (size < divisor) return x;
  const auto exponent_of = [](uint bits) { return bits >> 23 ? static_cast<int>(bits >> 23) : 1; };
  const auto mantissa_of = [](uint bits) {
    return bits >> 23 ? (bits & 0x7fffffu) | 0x800000u : bits;
  };
  const uint size_bits = bits_of(size), divisor_bits = bits_of(divisor);
  const ulong by = mantissa_of(divisor_bits);
  int shift = exponent_of(size_bits) - exponent_of(divisor_bits);
  ulong rest = mantissa_of(size_bits) % by;
  while (shift > 0 && rest != 0) {
    const int step = shift < 32 ? shift : 32;
    rest = (rest << step) % by;
    shift -= step;
  }
  // rest < 2^24 in units of the divisor's last place, so two multiplications are exact.
  const int exponent = exponent_of(divisor_bits) - 150;
  const float first = from_bits(static_cast<uint>((exponent >> 1) + 127) << 23);
  const float second = from_bits(static_cast<uint>(exponent - (exponent >> 1) + 127) << 23);
  return with_sign_of(static_cast<float>(rest) * first * second, x);
}
MSLC_INLINE float nextafter(float x, float y) {
  if (x != x || y != y) return x + y;
  if (x == y) return y;
  if (x == 0.0f) return with_sign_of(from_bits(1), y);
  return from_bits(bits_of(x) + ((x < y) == (x > 0.0f) ? 1u : ~0u));
}

}  // namespace mslc::target

#pragma clang fp contract(fast)

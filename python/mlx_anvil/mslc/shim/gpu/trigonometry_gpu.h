// sin, cos and tan: range reduction to an eighth of a turn, then a polynomial.
#pragma once

#include "math_gpu.h"

#pragma clang fp contract(off)  // see math_gpu.h

namespace mslc::target {

// A reduced angle: quadrant * pi/2 + angle, |angle| <= pi/4.
struct Reduced {
  float angle;
  int quadrant;
};

// Words of 2/pi, most significant first, after 64 zero bits.
MSLC_INLINE uint two_over_pi(uint word) {
  static constexpr uint words[] = {0,          0,          0xa2f9836e, 0x4e441529,
                                   0xfc2757d1, 0xf534ddc0, 0xdb629599, 0x3c439041};
  return words[word];
}

// Payne-Hanek reduction: multiplies by the 96 bits of 2/pi that determine the fraction of a turn.
MSLC_INLINE Reduced reduce_large_angle(float x) {
  const uint bits = bits_of(x);
  const uint exponent = (bits >> 23 & 255) - 127;
  const ulong mantissa = (bits << 8) | 0x80000000u;  // x = mantissa * 2^(exponent - 31)
  const uint first = exponent + 31, word = first >> 5, shift = first & 31;
  const auto window = [=](uint i) {
    const ulong pair =
        (static_cast<ulong>(two_over_pi(word + i)) << 32) | two_over_pi(word + i + 1);
    return static_cast<ulong>(static_cast<uint>(pair << shift >> 32));
  };
  // The top 64 of the low 96 bits of the product: two bits of quadrant, then the fraction.
  const ulong turns =
      (mantissa * window(0) << 32) + mantissa * window(1) + (mantissa * window(2) >> 32);
  const long fraction = static_cast<long>(turns << 2);
  const float high = static_cast<float>(fraction);
  const float low = static_cast<float>(fraction - (high < 0x1p63f ? static_cast<long>(high) : 0));
  const float scale = 0x1.921fb6p-64f, scale_low = -0x1.777a5cp-89f;
  const float angle = high * scale + multiply_add(high, scale_low, low * scale);
  const int quadrant = static_cast<int>((turns + 0x2000000000000000ul) >> 62);
  const bool negative = bits >> 31;
  return {negative ? -angle : angle, negative ? -quadrant : quadrant};
}

MSLC_INLINE Reduced reduce_angle(float x) {
  if (!(magnitude(x) <= 0x1p15f)) return reduce_large_angle(x);
  const float turns = __builtin_rintf(x * 0x1.45f306p-1f);
  float angle = multiply_add(turns, -0x1.921fb6p+0f, x);
  angle = multiply_add(turns, 0x1.777a5cp-25f, angle);
  angle = multiply_add(turns, 0x1.ee59dap-50f, angle);
  return {angle, static_cast<int>(turns)};
}

MSLC_INLINE float small_sin(float x) {
  const float square = x * x;
  return multiply_add(
      x * square,
      polynomial(square, -0x1.555556p-3f, 0x1.111108p-7f, -0x1.a00f48p-13f, 0x1.6cc50ap-19f), x);
}
MSLC_INLINE float small_cos(float x) {
  const float square = x * x;
  const float tail = polynomial(square, 0x1.55554ap-5f, -0x1.6c0bfcp-10f, 0x1.99dba2p-16f);
  return multiply_add(square, multiply_add(square, tail, -0.5f), 1.0f);
}
MSLC_INLINE float sin_of(Reduced r) {
  const float value = r.quadrant & 1 ? small_cos(r.angle) : small_sin(r.angle);
  return r.quadrant & 2 ? -value : value;
}
MSLC_INLINE float cos_of(Reduced r) {
  return sin_of({r.angle, r.quadrant + 1});
}
MSLC_INLINE float tan_of(Reduced r) {
  const float sine = small_sin(r.angle), cosine = small_cos(r.angle);
  return r.quadrant & 1 ? -cosine / sine : sine / cosine;
}

// Returns NaN for an infinite x, whose angle is undefined.
MSLC_INLINE float where_finite(float x, float value) {
  return magnitude(x) < infinity() ? value : not_a_number();
}
MSLC_INLINE float sin(float x) {
  return x == 0.0f ? x : where_finite(x, sin_of(reduce_angle(x)));
}
MSLC_INLINE float cos(float x) {
  return where_finite(x, cos_of(reduce_angle(x)));
}
MSLC_INLINE float tan(float x) {
  return x == 0.0f ? x : where_finite(x, tan_of(reduce_angle(x)));
}

// Reduces pi x. The reduction is exact.
MSLC_INLINE Reduced reduce_half_turns(float x) {
  const float wrapped = x - 2.0f * __builtin_rintf(0.5f * x);
  const float turns = __builtin_rintf(2.0f * wrapped);
  const float rest = multiply_add(-0.5f, turns, wrapped);
  return {multiply_add(rest, 0x1.921fb6p+1f, rest * -0x1.777a5cp-24f), static_cast<int>(turns)};
}
MSLC_INLINE float sinpi(float x) {
  const bool whole = __builtin_truncf(x) == x && x - x == 0.0f;
  return whole ? with_sign_of(0.0f, x) : where_finite(x, sin_of(reduce_half_turns(x)));
}
MSLC_INLINE float cospi(float x) {
  return where_finite(x, cos_of(reduce_half_turns(x)) + 0.0f);  // zeros must be positive
}
MSLC_INLINE float tanpi(float x) {
  return x == 0.0f ? x : where_finite(x, tan_of(reduce_half_turns(x)));
}

}  // namespace mslc::target

#pragma clang fp contract(fast)

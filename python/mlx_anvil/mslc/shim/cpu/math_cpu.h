// Transcendental functions of the CPU target, from the C library, which satisfies MSL's error
// bounds.
#pragma once

#include "count_cpu.h"

namespace mslc::target {

#define MSLC_C_FUNCTION(name)           \
  MSLC_INLINE float name(float x) {     \
    count<MSLC_COUNT_TRANSCENDENTAL>(); \
    return __builtin_##name##f(x);      \
  }
MSLC_C_FUNCTION(acos)
MSLC_C_FUNCTION(acosh)
MSLC_C_FUNCTION(asin)
MSLC_C_FUNCTION(asinh)
MSLC_C_FUNCTION(atan)
MSLC_C_FUNCTION(atanh)
MSLC_C_FUNCTION(cos)
MSLC_C_FUNCTION(cosh)
MSLC_C_FUNCTION(exp)
MSLC_C_FUNCTION(exp2)
MSLC_C_FUNCTION(log)
MSLC_C_FUNCTION(log10)
MSLC_C_FUNCTION(log2)
MSLC_C_FUNCTION(sin)
MSLC_C_FUNCTION(sinh)
MSLC_C_FUNCTION(sqrt)
MSLC_C_FUNCTION(tan)
MSLC_C_FUNCTION(tanh)
#undef MSLC_C_FUNCTION

MSLC_INLINE float exp10(float x) {
  count<MSLC_COUNT_TRANSCENDENTAL>();
  return static_cast<float>(__builtin_pow(10.0, x));
}
MSLC_INLINE float rsqrt(float x) {
  count<MSLC_COUNT_TRANSCENDENTAL>();
  // In float, the two roundings could exceed the one ulp that MSL allows.
  return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x)));
}
MSLC_INLINE float pow(float x, float y) {
  count<MSLC_COUNT_TRANSCENDENTAL>();
  return __builtin_powf(x, y);
}
MSLC_INLINE float atan2(float y, float x) {
  count<MSLC_COUNT_TRANSCENDENTAL>();
  return __builtin_atan2f(y, x);
}
MSLC_INLINE float fma(float x, float y, float z) {
  return __builtin_fmaf(x, y, z);
}
// A double represents the sum of a half and a product of halves exactly.
MSLC_INLINE half fma(half x, half y, half z) {
  return static_cast<half>(__builtin_fma(x, y, z));
}
MSLC_INLINE float fmod(float x, float y) {
  return __builtin_fmodf(x, y);
}
MSLC_INLINE float nextafter(float x, float y) {
  return __builtin_nextafterf(x, y);
}

// sin(pi x) and cos(pi x). The angle to the nearest quarter turn is exact, so zeros are exact too.
MSLC_INLINE double sine_of_quarters(double angle, int quarters) {
  const double value = quarters & 1 ? __builtin_cos(angle) : __builtin_sin(angle);
  return quarters & 2 ? -value : value;
}
MSLC_INLINE float sine_of_half_turns(float x, int more_quarters) {
  if (!__builtin_isfinite(x)) return __builtin_nanf("");
  const double half_turns = x - 2.0 * __builtin_rint(0.5 * x);
  const double quarters = __builtin_rint(2.0 * half_turns);
  const double angle = (half_turns - 0.5 * quarters) * 3.14159265358979323846;
  return static_cast<float>(sine_of_quarters(angle, static_cast<int>(quarters) + more_quarters));
}
MSLC_INLINE float sinpi(float x) {
  count<MSLC_COUNT_TRANSCENDENTAL>();
  return __builtin_truncf(x) == x && __builtin_isfinite(x) ? __builtin_copysignf(0.0f, x)
                                                           : sine_of_half_turns(x, 0);
}
MSLC_INLINE float cospi(float x) {
  count<MSLC_COUNT_TRANSCENDENTAL>();
  return sine_of_half_turns(x, 1) + 0.0f;  // MSL's zeros of cospi are positive
}
MSLC_INLINE float tanpi(float x) {
  return sinpi(x) / cospi(x);
}

}  // namespace mslc::target

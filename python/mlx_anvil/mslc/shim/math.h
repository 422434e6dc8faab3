// <metal_math> for float, half and their vectors. bfloat arguments give float results, like Metal's
// implicit conversion.
#pragma once

#include "elementwise.h"

namespace mslc::reference {

// Target-independent functions. `fract` returns the largest number below 1 where rounding would
// give 1.
template <class T>
MSLC_INLINE T fract(T x) {
  constexpr T below_one = static_cast<T>(__is_same(T, half) ? 0x1.ffcp-1f : 0x1.fffffep-1f);
  const T f = static_cast<T>(static_cast<float>(x) - __builtin_floorf(static_cast<float>(x)));
  return f >= T(1) ? below_one : f;
}
MSLC_INLINE float fmax(float a, float b) {
  return __builtin_fmaxf(a, b);
}
MSLC_INLINE float fmin(float a, float b) {
  return __builtin_fminf(a, b);
}
MSLC_INLINE float fmax3(float a, float b, float c) {
  return fmax(a, fmax(b, c));
}
MSLC_INLINE float fmin3(float a, float b, float c) {
  return fmin(a, fmin(b, c));
}
MSLC_INLINE float fmedian3(float a, float b, float c) {
  return fmax(fmin(a, b), fmin(fmax(a, b), c));
}
MSLC_INLINE float fdim(float a, float b) {
  return a <= b ? 0.0f : a - b;
}
MSLC_INLINE float divide(float a, float b) {
  return a / b;
}
// Returns x without its integer part, which is 0 for an infinity.
MSLC_INLINE float fraction(float x) {
  const float whole = __builtin_truncf(x);
  return __builtin_copysignf(x == whole ? 0.0f : x - whole, x);
}
MSLC_INLINE float copysign(float a, float b) {
  return __builtin_copysignf(a, b);
}
MSLC_INLINE float fabs(float x) {
  return __builtin_fabsf(x);
}
MSLC_INLINE float ceil(float x) {
  return __builtin_ceilf(x);
}
MSLC_INLINE float floor(float x) {
  return __builtin_floorf(x);
}
MSLC_INLINE float trunc(float x) {
  return __builtin_truncf(x);
}
MSLC_INLINE float rint(float x) {
  return __builtin_rintf(x);
}
MSLC_INLINE float round(float x) {
  float whole = __builtin_truncf(x);
  return __builtin_fabsf(x - whole) >= 0.5f ? whole + __builtin_copysignf(1.0f, x) : whole;
}
// Multiplies by powers of two in steps, to reach subnormal results. The steps down keep 24 bits in
// reserve, so the result is rounded once.
MSLC_INLINE float ldexp(float x, int exponent) {
  exponent = exponent > 300 ? 300 : exponent < -300 ? -300 : exponent;
  auto power = [](int e) { return __builtin_bit_cast(float, static_cast<uint>(e + 127) << 23); };
  while (exponent > 127) {
    x *= power(127);
    exponent -= 127;
  }
  while (exponent < -126) {
    x *= power(-102);
    exponent += 102;
  }
  return x * power(exponent);
}
MSLC_INLINE float frexp(float x, int& exponent) {
  exponent = 0;
  if (x == 0 || x != x || x - x != 0) return x;
  uint bits = __builtin_bit_cast(uint, x);
  int biased = static_cast<int>(bits >> 23 & 255);
  int scaled = 0;
  if (biased == 0) {
    bits = __builtin_bit_cast(uint, x * 0x1p24f);
    biased = static_cast<int>(bits >> 23 & 255);
    scaled = 24;
  }
  exponent = biased - 126 - scaled;
  return __builtin_bit_cast(float, (bits & 0x807fffffu) | 0x3f000000u);
}
MSLC_INLINE int ilogb(float x) {
  int exponent;
  frexp(x, exponent);
  if (x == 0) return -__INT_MAX__ - 1;
  return x - x != 0 ? __INT_MAX__ : exponent - 1;
}

}  // namespace mslc::reference

namespace mslc {

// Applies `function` to scalars, or componentwise to vectors. The result is an R.
template <class R, class Function, class... T>
MSLC_INLINE R each(Function function, T... x) {
  if constexpr (is_vector<R>) {
    R results = {};
    for (int i = 0; i < length_of<R>; ++i)
      results[i] = static_cast<ElementOf<R>>(function(component(x, i)...));
    return results;
  } else {
    return static_cast<R>(function(x...));
  }
}

MSLC_INLINE int exponent_of(float x) {
  int exponent;
  reference::frexp(x, exponent);
  return exponent;
}
MSLC_INLINE float fraction_of(float x) {
  int exponent;
  return reference::frexp(x, exponent);
}

// Functions that have a fast form on some targets.
namespace accurate {
using reference::divide;
using target::cos;
using target::exp;
using target::exp2;
using target::log;
using target::log2;
using target::rsqrt;
using target::sin;
using target::sqrt;
}  // namespace accurate
#if defined(__NVPTX__)
namespace fast {
using target::cos;
using target::exp;
using target::log;
using target::log2;
using target::rsqrt;
using target::sin;
using target::sqrt;
}  // namespace fast
#elif !defined(__SPIRV__)
namespace fast = accurate;
#endif

}  // namespace mslc

// Defines metal::name for reals, and __metal_name, the form with a precision mode that MLX calls.
#define MSLC_MATH(space, name)                                                           \
  template <class... T>                                                                  \
    requires ::mslc::Reals<T...>                                                         \
  MSLC_INLINE auto name(T... x) {                                                        \
    return ::mslc::map_float([](auto... v) { return ::mslc::space::name(v...); }, x...); \
  }
// For functions that would round twice if half were converted to float.
#define MSLC_MATH_IN_OWN_TYPE(space, name)                                            \
  template <class... T>                                                               \
    requires ::mslc::Reals<T...>                                                      \
  MSLC_INLINE auto name(T... x) {                                                     \
    using E = ::mslc::RealElement<T...>;                                              \
    return ::mslc::map<E>([](auto... v) { return ::mslc::space::name(v...); }, x...); \
  }

// `quick` is the namespace of the fast forms on targets that have them, and `accurate` elsewhere.
#define MSLC_ALL_MATH(quick)                                                                 \
  MSLC_MATH(target, acos)                                                                    \
  MSLC_MATH(target, acosh)                                                                   \
  MSLC_MATH(target, asin)                                                                    \
  MSLC_MATH(target, asinh)                                                                   \
  MSLC_MATH(target, atan)                                                                    \
  MSLC_MATH(target, atan2)                                                                   \
  MSLC_MATH(target, atanh)                                                                   \
  MSLC_MATH(quick, cos)                                                                      \
  MSLC_MATH(target, cosh)                                                                    \
  MSLC_MATH(target, cospi)                                                                   \
  MSLC_MATH(quick, exp)                                                                      \
  MSLC_MATH(target, exp10)                                                                   \
  MSLC_MATH(quick, exp2)                                                                     \
  MSLC_MATH(target, fmod)                                                                    \
  MSLC_MATH(quick, log)                                                                      \
  MSLC_MATH(target, log10)                                                                   \
  MSLC_MATH(quick, log2)                                                                     \
  MSLC_MATH(target, pow)                                                                     \
  MSLC_MATH(quick, rsqrt)                                                                    \
  MSLC_MATH(quick, sin)                                                                      \
  MSLC_MATH(target, sinh)                                                                    \
  MSLC_MATH(target, sinpi)                                                                   \
  MSLC_MATH(quick, sqrt)                                                                     \
  MSLC_MATH(target, tan)                                                                     \
  MSLC_MATH(target, tanh)                                                                    \
  MSLC_MATH(target, tanpi)                                                                   \
  MSLC_MATH(reference, ceil)                                                                 \
  MSLC_MATH(reference, copysign)                                                             \
  MSLC_MATH(quick, divide)                                                                   \
  MSLC_MATH(reference, fabs)                                                                 \
  MSLC_MATH(reference, fdim)                                                                 \
  MSLC_MATH(reference, floor)                                                                \
  MSLC_MATH_IN_OWN_TYPE(target, fma)                                                         \
  MSLC_MATH(reference, fmax)                                                                 \
  MSLC_MATH(reference, fmax3)                                                                \
  MSLC_MATH(reference, fmedian3)                                                             \
  MSLC_MATH(reference, fmin)                                                                 \
  MSLC_MATH(reference, fmin3)                                                                \
  MSLC_MATH_IN_OWN_TYPE(reference, fract)                                                    \
  MSLC_MATH(reference, rint)                                                                 \
  MSLC_MATH(reference, round)                                                                \
  MSLC_MATH(reference, trunc)                                                                \
  template <class X, class Y>                                                                \
    requires ::mslc::Reals<X, Y>                                                             \
  MSLC_INLINE auto powr(X x, Y y) {                                                          \
    return pow(x, y);                                                                        \
  }                                                                                          \
  template <class T, class E>                                                                \
    requires(::mslc::Reals<T> && ::mslc::Wholes<E>)                                          \
  MSLC_INLINE T ldexp(T x, E exponent) {                                                     \
    return ::mslc::each<T>([](float v, int e) { return ::mslc::reference::ldexp(v, e); }, x, \
                           exponent);                                                        \
  }                                                                                          \
  template <class T, class E>                                                                \
    requires(::mslc::Reals<T> && ::mslc::Wholes<E>)                                          \
  MSLC_INLINE T frexp(T x, thread E& exponent) {                                             \
    exponent = ::mslc::each<E>(::mslc::exponent_of, x);                                      \
    return ::mslc::each<T>(::mslc::fraction_of, x);                                          \
  }                                                                                          \
  template <class T>                                                                         \
    requires ::mslc::Reals<T>                                                                \
  MSLC_INLINE T modf(T x, thread T& whole) {                                                 \
    whole = trunc(x);                                                                        \
    return ::mslc::each<T>(::mslc::reference::fraction, x);                                  \
  }                                                                                          \
  template <class T>                                                                         \
    requires ::mslc::Reals<T>                                                                \
  MSLC_INLINE T sincos(T x, thread T& cosine) {                                              \
    cosine = T(cos(x));                                                                      \
    return T(sin(x));                                                                        \
  }

namespace metal {

MSLC_ALL_MATH(accurate)

// On real hardware these differ in accuracy. The targets satisfy both bounds.
namespace fast {
MSLC_ALL_MATH(fast)
}
namespace precise {
MSLC_ALL_MATH(accurate)
}

template <class T>
  requires mslc::Reals<T>
MSLC_INLINE auto ilogb(T x) {
  return mslc::map<float>([](float v) { return mslc::reference::ilogb(v); }, x);
}

// Steps in the argument's type, so half steps in units of half.
template <class T>
  requires(mslc::is_real<T> && !mslc::is_vector<T>)
MSLC_INLINE T nextafter(T x, T y) {
  if constexpr (__is_same(T, float)) {
    return mslc::target::nextafter(x, y);
  } else {
    if (x != x || y != y) return x + y;
    if (x == y) return y;
    short bits = __builtin_bit_cast(short, x);
    if (x == T(0)) return __builtin_bit_cast(T, static_cast<short>(y < T(0) ? 0x8001 : 1));
    bits = static_cast<short>(bits + ((x < y) == (x > T(0)) ? 1 : -1));
    return __builtin_bit_cast(T, bits);
  }
}
template <class T>
  requires(mslc::is_real<T> && mslc::is_vector<T>)
MSLC_INLINE T nextafter(T x, T y) {
  return mslc::map<mslc::ElementOf<T>>([](auto a, auto b) { return nextafter(a, b); }, x, y);
}

#undef MSLC_ALL_MATH
#undef MSLC_MATH_IN_OWN_TYPE
#undef MSLC_MATH

// The compiler's internal names of these functions, which MLX's bfloat overloads use. The last
// argument selects fast or precise.
#define MSLC_INTERNAL_1(name)                      \
  MSLC_INLINE float __metal_##name(float x, int) { \
    return name(x);                                \
  }
#define MSLC_INTERNAL_2(name)                               \
  MSLC_INLINE float __metal_##name(float x, float y, int) { \
    return name(x, y);                                      \
  }
#define MSLC_INTERNAL_3(name)                                        \
  MSLC_INLINE float __metal_##name(float x, float y, float z, int) { \
    return name(x, y, z);                                            \
  }
MSLC_INTERNAL_1(acos)
MSLC_INTERNAL_1(acosh)
MSLC_INTERNAL_1(asin)
MSLC_INTERNAL_1(asinh)
MSLC_INTERNAL_1(atan)
MSLC_INTERNAL_1(atanh)
MSLC_INTERNAL_1(ceil)
MSLC_INTERNAL_1(cos)
MSLC_INTERNAL_1(cosh)
MSLC_INTERNAL_1(cospi)
MSLC_INTERNAL_1(exp)
MSLC_INTERNAL_1(exp10)
MSLC_INTERNAL_1(exp2)
MSLC_INTERNAL_1(fabs)
MSLC_INTERNAL_1(floor)
MSLC_INTERNAL_1(fract)
MSLC_INTERNAL_1(log)
MSLC_INTERNAL_1(log10)
MSLC_INTERNAL_1(log2)
MSLC_INTERNAL_1(rint)
MSLC_INTERNAL_1(round)
MSLC_INTERNAL_1(rsqrt)
MSLC_INTERNAL_1(sin)
MSLC_INTERNAL_1(sinh)
MSLC_INTERNAL_1(sinpi)
MSLC_INTERNAL_1(sqrt)
MSLC_INTERNAL_1(tan)
MSLC_INTERNAL_1(tanh)
MSLC_INTERNAL_1(tanpi)
MSLC_INTERNAL_1(trunc)
MSLC_INTERNAL_2(atan2)
MSLC_INTERNAL_2(divide)
MSLC_INTERNAL_2(fmax)
MSLC_INTERNAL_2(fmin)
MSLC_INTERNAL_2(fmod)
MSLC_INTERNAL_2(pow)
MSLC_INTERNAL_2(powr)
MSLC_INTERNAL_3(fmax3)
MSLC_INTERNAL_3(fmedian3)
MSLC_INTERNAL_3(fmin3)
#undef MSLC_INTERNAL_1
#undef MSLC_INTERNAL_2
#undef MSLC_INTERNAL_3
MSLC_INLINE float __metal_fma(float x, float y, float z) {
  return fma(x, y, z);
}
MSLC_INLINE float __metal_nextafter(float x, float y) {
  return nextafter(x, y);
}
MSLC_INLINE float __metal_ldexp(float x, int exponent, int) {
  return ldexp(x, exponent);
}
MSLC_INLINE float __metal_frexp(float x, thread int* exponent, int = 0) {
  return frexp(x, *exponent);
}

}  // namespace metal

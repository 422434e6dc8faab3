// <metal_relational>. Vector results are bool vectors.
#pragma once

#include "integer.h"

namespace mslc::reference {

template <class T>
MSLC_INLINE constexpr uint exponent_field(T x) {
  return __builtin_bit_cast(uint, static_cast<float>(x)) >> 23 & 255;
}
// These compare bits, so that no floating-point option of the compiler can remove the test.
MSLC_INLINE constexpr bool isnan(float x) {
  return (__builtin_bit_cast(uint, x) & 0x7fffffffu) > 0x7f800000u;
}
MSLC_INLINE constexpr bool isinf(float x) {
  return (__builtin_bit_cast(uint, x) & 0x7fffffffu) == 0x7f800000u;
}
MSLC_INLINE constexpr bool isfinite(float x) {
  return exponent_field(x) != 255;
}
MSLC_INLINE constexpr bool signbit(float x) {
  return __builtin_bit_cast(uint, x) >> 31;
}

}  // namespace mslc::reference

namespace metal {

template <class T>
  requires mslc::Reals<T>
MSLC_INLINE constexpr auto isnan(T x) {
  return mslc::map<float>([](float v) { return mslc::reference::isnan(v); }, x);
}
template <class T>
  requires mslc::Reals<T>
MSLC_INLINE constexpr auto isinf(T x) {
  return mslc::map<float>([](float v) { return mslc::reference::isinf(v); }, x);
}
template <class T>
  requires mslc::Reals<T>
MSLC_INLINE constexpr auto isfinite(T x) {
  return mslc::map<float>([](float v) { return mslc::reference::isfinite(v); }, x);
}
template <class T>
  requires mslc::Reals<T>
MSLC_INLINE constexpr auto isnormal(T x) {
  using E = mslc::ElementOf<T>;
  return mslc::map<E>(
      [](E v) {
        return mslc::reference::isfinite(static_cast<float>(v)) &&
               __builtin_fabsf(static_cast<float>(v)) >=
                   static_cast<float>(numeric_limits<E>::min());
      },
      x);
}
template <class T>
  requires mslc::Reals<T>
MSLC_INLINE constexpr auto signbit(T x) {
  return mslc::map<float>([](float v) { return mslc::reference::signbit(v); }, x);
}
template <class T>
  requires mslc::Reals<T>
MSLC_INLINE constexpr auto isunordered(T x, T y) {
  return isnan(x) || isnan(y);
}
template <class T>
  requires mslc::Reals<T>
MSLC_INLINE constexpr auto isordered(T x, T y) {
  return !isunordered(x, y);
}

MSLC_INLINE constexpr bool any(bool b) {
  return b;
}
MSLC_INLINE constexpr bool all(bool b) {
  return b;
}
template <class V>
  requires mslc::is_vector<V>
MSLC_INLINE constexpr bool any(V v) {
  bool result = false;
  for (int i = 0; i < mslc::length_of<V>; ++i) result |= v[i] != 0;
  return result;
}
template <class V>
  requires mslc::is_vector<V>
MSLC_INLINE constexpr bool all(V v) {
  bool result = true;
  for (int i = 0; i < mslc::length_of<V>; ++i) result &= v[i] != 0;
  return result;
}

// c ? b : a, per component.
template <class T>
MSLC_INLINE constexpr T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, class M>
  requires(mslc::is_vector<T> && mslc::length_of<T> == mslc::length_of<M>)
MSLC_INLINE constexpr T select(T a, T b, M mask) {
  T result = a;
  for (int i = 0; i < mslc::length_of<T>; ++i)
    if (mask[i]) result[i] = b[i];
  return result;
}

}  // namespace metal

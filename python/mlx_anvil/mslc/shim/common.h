// <metal_common>, and the comparisons shared by integers and reals.
#pragma once

#include "math.h"

namespace mslc {

template <class T>
MSLC_INLINE constexpr T larger(T a, T b) {
  if constexpr (is_real<T>)
    return b > a || a != a ? b : a;
  else
    return a < b ? b : a;
}
template <class T>
MSLC_INLINE constexpr T smaller(T a, T b) {
  if constexpr (is_real<T>)
    return b < a || a != a ? b : a;
  else
    return b < a ? b : a;
}

template <class T>
T Max::apply(T a, T b) {
  return larger(a, b);
}
template <class T>
T Min::apply(T a, T b) {
  return smaller(a, b);
}

// The element type of two mixed arguments according to the usual arithmetic conversions. Arguments
// of the same type keep it: short is not promoted to int.
template <class A, class B>
struct CommonElement {
  using type = decltype(ElementOf<A>{} + ElementOf<B>{});
};
template <class A, class B>
  requires __is_same
(ElementOf<A>, ElementOf<B>) struct CommonElement<A, B> {
  using type = ElementOf<A>;
};
template <class A, class B>
using CommonElementOf = typename CommonElement<A, B>::type;

}  // namespace mslc

namespace metal {

template <class A, class B>
  requires mslc::Numbers<A, B>
MSLC_INLINE constexpr auto max(A a, B b) {
  using E = mslc::CommonElementOf<A, B>;
  return mslc::map<E>([](E x, E y) { return mslc::larger(x, y); }, a, b);
}
template <class A, class B>
  requires mslc::Numbers<A, B>
MSLC_INLINE constexpr auto min(A a, B b) {
  using E = mslc::CommonElementOf<A, B>;
  return mslc::map<E>([](E x, E y) { return mslc::smaller(x, y); }, a, b);
}
MSLC_INLINE constexpr bool max(bool a, bool b) {
  return a || b;
}
MSLC_INLINE constexpr bool min(bool a, bool b) {
  return a && b;
}

template <class T, class L, class H>
  requires mslc::Numbers<T, L, H>
MSLC_INLINE constexpr auto clamp(T x, L low, H high) {
  return min(max(x, low), high);
}
template <class T>
  requires mslc::Numbers<T>
MSLC_INLINE constexpr T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <class T>
  requires mslc::Numbers<T>
MSLC_INLINE constexpr T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
template <class T>
  requires mslc::Numbers<T>
MSLC_INLINE constexpr T median3(T a, T b, T c) {
  return max(min(a, b), min(max(a, b), c));
}

template <class T>
  requires mslc::Numbers<T>
MSLC_INLINE constexpr T abs(T x) {
  using E = mslc::ElementOf<T>;
  return mslc::map<E>(
      [](E v) {
        if constexpr (mslc::is_real<E>)
          return v < E(0) || v == E(0) ? E(E(0) - v) : v;
        else
          return v < E(0) ? E(-v) : v;
      },
      x);
}

template <class T>
  requires mslc::Reals<T>
MSLC_INLINE T saturate(T x) {
  return clamp(x, mslc::ElementOf<T>(0), mslc::ElementOf<T>(1));
}
template <class T>
  requires mslc::Reals<T>
MSLC_INLINE T sign(T x) {
  using E = mslc::ElementOf<T>;
  return mslc::map<E>([](E v) { return v > E(0)   ? E(1)
                                       : v < E(0) ? E(-1)
                                       : v == v   ? v
                                                  : E(0); },
                      x);
}
template <class T, class A>
  requires mslc::Reals<T, A>
MSLC_INLINE T mix(T x, T y, A a) {
  return x + (y - x) * a;
}
template <class T>
  requires mslc::Reals<T>
MSLC_INLINE T step(T edge, T x) {
  using E = mslc::ElementOf<T>;
  return mslc::map<E>([](E e, E v) { return v < e ? E(0) : E(1); }, edge, x);
}
template <class T>
  requires mslc::Reals<T>
MSLC_INLINE T smoothstep(T edge0, T edge1, T x) {
  T t = saturate((x - edge0) / (edge1 - edge0));
  using E = mslc::ElementOf<T>;
  return t * t * (E(3) - E(2) * t);
}

namespace fast {
using metal::abs;
using metal::clamp;
using metal::max;
using metal::min;
using metal::saturate;
}  // namespace fast
namespace precise {
using metal::abs;
using metal::clamp;
using metal::max;
using metal::min;
using metal::saturate;
}  // namespace precise

}  // namespace metal

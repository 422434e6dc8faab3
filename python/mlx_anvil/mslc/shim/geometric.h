// <metal_geometric>.
#pragma once

#include "relational.h"

namespace mslc {
template <class T>
concept RealVector = is_vector<T> && is_real<T>;
}

namespace metal {

template <class T, int N>
MSLC_INLINE constexpr T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
template <class T>
MSLC_INLINE vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}
template <mslc::RealVector V>
MSLC_INLINE auto length_squared(V v) {
  return dot(v, v);
}
template <mslc::RealVector V>
MSLC_INLINE auto length(V v) {
  return sqrt(dot(v, v));
}
template <mslc::RealVector V>
MSLC_INLINE auto distance_squared(V a, V b) {
  return length_squared(a - b);
}
template <mslc::RealVector V>
MSLC_INLINE auto distance(V a, V b) {
  return length(a - b);
}
template <mslc::RealVector V>
MSLC_INLINE V normalize(V v) {
  return v * rsqrt(dot(v, v));
}
template <mslc::RealVector V>
MSLC_INLINE V faceforward(V n, V i, V reference) {
  return dot(reference, i) < 0 ? n : -n;
}
template <mslc::RealVector V>
MSLC_INLINE V reflect(V i, V n) {
  const V normal = normalize(n);
  return i - 2 * dot(normal, i) * normal;
}
template <mslc::RealVector V>
MSLC_INLINE V refract(V i, V n, mslc::ElementOf<V> eta) {
  using E = mslc::ElementOf<V>;
  const E cosine = dot(n, i);
  const E k = E(1) - eta * eta * (E(1) - cosine * cosine);
  return k < E(0) ? V(E(0)) : eta * i - (eta * cosine + sqrt(k)) * n;
}

namespace fast {
using metal::distance;
using metal::length;
using metal::normalize;
}  // namespace fast
namespace precise {
using metal::distance;
using metal::length;
using metal::normalize;
}  // namespace precise

}  // namespace metal

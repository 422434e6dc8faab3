// bool2, bool3, bool4. clang's bool vectors are bit sets of another size, without swizzles, so
// these are structs. They convert from the integer masks that vector comparisons return.
#pragma once

#include "swizzle.h"

namespace mslc {

template <int N>
struct BoolVector;
template <int N>
struct AnyVector<bool, N> {
  using type = BoolVector<N>;
};

template <int N>
struct BoolComponents;
template <>
struct BoolComponents<2> {
  union {
    bool component[2];
    struct {
      bool x, y;
    };
    struct {
      bool r, g;
    };
  };
};
template <>
struct BoolComponents<3> {
  union {
    bool component[4];
    struct {
      bool x, y, z;
    };
    struct {
      bool r, g, b;
    };
  };
};
template <>
struct BoolComponents<4> {
  union {
    bool component[4];
    struct {
      bool x, y, z, w;
    };
    struct {
      bool r, g, b, a;
    };
  };
};

template <int N>
struct alignas(N == 3 ? 4 : N) BoolVector : BoolComponents<N>, Swizzles<BoolVector<N>, bool, N> {
  using BoolComponents<N>::component;

  BoolVector() = default;  // trivial, so that unions can contain it
  constexpr BoolVector(bool all) : BoolComponents<N>{} {
    for (int i = 0; i < N; ++i) component[i] = all;
  }
  template <class... B>
    requires(sizeof...(B) == N && N > 1)
  constexpr BoolVector(B... values) : BoolComponents<N>{} {
    int i = 0;
    ((component[i++] = bool(values)), ...);
  }
  // Converts a comparison's mask, or numbers as in bool4(int4).
  template <class V>
    requires(length_of<V> == N)
  constexpr BoolVector(V mask) : BoolComponents<N>{} {
    for (int i = 0; i < N; ++i) component[i] = mask[i] != 0;
  }

  constexpr bool& operator[](int i) { return component[i]; }
  constexpr const bool& operator[](int i) const { return component[i]; }

  constexpr BoolVector operator!() const {
    BoolVector r(false);
    for (int i = 0; i < N; ++i) r[i] = !component[i];
    return r;
  }
  constexpr BoolVector operator~() const { return !*this; }

  template <class Op>
  static constexpr BoolVector zip(BoolVector a, BoolVector b, Op op) {
    BoolVector r(false);
    for (int i = 0; i < N; ++i) r[i] = op(a[i], b[i]);
    return r;
  }
  friend constexpr BoolVector operator&&(BoolVector a, BoolVector b) { return a & b; }
  friend constexpr BoolVector operator||(BoolVector a, BoolVector b) { return a | b; }
  friend constexpr BoolVector operator&(BoolVector a, BoolVector b) {
    return zip(a, b, [](bool p, bool q) { return p && q; });
  }
  friend constexpr BoolVector operator|(BoolVector a, BoolVector b) {
    return zip(a, b, [](bool p, bool q) { return p || q; });
  }
  friend constexpr BoolVector operator^(BoolVector a, BoolVector b) {
    return zip(a, b, [](bool p, bool q) { return p != q; });
  }
  friend constexpr BoolVector operator==(BoolVector a, BoolVector b) {
    return zip(a, b, [](bool p, bool q) { return p == q; });
  }
  friend constexpr BoolVector operator!=(BoolVector a, BoolVector b) { return a ^ b; }
};

template <int N>
struct VectorTraits<BoolVector<N>> : IsVector<bool, N> {};

template <class V>
constexpr bool is_bool_vector = false;
template <int N>
constexpr bool is_bool_vector<BoolVector<N>> = true;

}  // namespace mslc

namespace metal {
// vec<T, N> for places where the rewriter knows that T and N are not deduced.
template <class T, int N>
using mslc_any_vec = typename mslc::AnyVector<T, N>::type;

using bool2 = mslc::BoolVector<2>;
using bool3 = mslc::BoolVector<3>;
using bool4 = mslc::BoolVector<4>;
}  // namespace metal

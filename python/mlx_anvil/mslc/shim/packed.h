// Packed vectors such as packed_float3, which have the alignment of their element.
#pragma once

namespace mslc {

template <class T, int N>
struct PackedComponents;
template <class T>
struct PackedComponents<T, 2> {
  union {
    T component[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
  };
};
template <class T>
struct PackedComponents<T, 3> {
  union {
    T component[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
  };
};
template <class T>
struct PackedComponents<T, 4> {
  union {
    T component[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
  };
};

template <class T, int N>
struct PackedVector : PackedComponents<T, N>, Swizzles<PackedVector<T, N>, T, N> {
  using Vector = metal::vec<T, N>;
  using PackedComponents<T, N>::component;

  constexpr PackedVector() = default;
  constexpr PackedVector(Vector v) {
    for (int i = 0; i < N; ++i) component[i] = v[i];
  }
  template <class... A>
    requires(sizeof...(A) > 1)
  constexpr PackedVector(A... values) : PackedVector(make<Vector>(values...)) {}

  constexpr operator Vector() const {
    Vector v = {};
    for (int i = 0; i < N; ++i) v[i] = component[i];
    return v;
  }
  constexpr T& operator[](int i) { return component[i]; }
  constexpr const T& operator[](int i) const { return component[i]; }

  friend constexpr auto operator-(PackedVector a) { return -Vector(a); }
  friend constexpr auto operator~(PackedVector a) { return ~Vector(a); }
  friend constexpr auto operator!(PackedVector a) { return !Vector(a); }

// The operators convert packed vectors to vectors and broadcast scalars.
#define MSLC_PACKED_OPERATOR(op)                                      \
  friend constexpr auto operator op(PackedVector a, PackedVector b) { \
    return Vector(a) op Vector(b);                                    \
  }                                                                   \
  friend constexpr auto operator op(PackedVector a, Vector b) {       \
    return Vector(a) op b;                                            \
  }                                                                   \
  friend constexpr auto operator op(Vector a, PackedVector b) {       \
    return a op Vector(b);                                            \
  }                                                                   \
  friend constexpr auto operator op(PackedVector a, T b) {            \
    return Vector(a) op b;                                            \
  }                                                                   \
  friend constexpr auto operator op(T a, PackedVector b) {            \
    return a op Vector(b);                                            \
  }
#define MSLC_PACKED_ASSIGNMENT(op)                     \
  MSLC_PACKED_OPERATOR(op)                             \
  constexpr PackedVector& operator op## = (Vector v) { \
    return *this = Vector(*this) op v;                 \
  }
  MSLC_PACKED_ASSIGNMENT(+)
  MSLC_PACKED_ASSIGNMENT(-)
  MSLC_PACKED_ASSIGNMENT(*)
  MSLC_PACKED_ASSIGNMENT(/)
  MSLC_PACKED_ASSIGNMENT(%)
  MSLC_PACKED_ASSIGNMENT(&)
  MSLC_PACKED_ASSIGNMENT(|)
  MSLC_PACKED_ASSIGNMENT(^)
  MSLC_PACKED_ASSIGNMENT(<<)
  MSLC_PACKED_ASSIGNMENT(>>)
  MSLC_PACKED_OPERATOR(==)
  MSLC_PACKED_OPERATOR(!=)
  MSLC_PACKED_OPERATOR(<)
  MSLC_PACKED_OPERATOR(>)
  MSLC_PACKED_OPERATOR(<=)
  MSLC_PACKED_OPERATOR(>=)
  MSLC_PACKED_OPERATOR(&&)
  MSLC_PACKED_OPERATOR(||)
#undef MSLC_PACKED_ASSIGNMENT
#undef MSLC_PACKED_OPERATOR
};

template <class T, int N>
struct VectorTraits<PackedVector<T, N>> : IsVector<T, N> {};

}  // namespace mslc

namespace metal {

template <class T, int N>
using packed_vec = mslc::PackedVector<T, N>;

using packed_char2 = packed_vec<char, 2>;
using packed_char3 = packed_vec<char, 3>;
using packed_char4 = packed_vec<char, 4>;
using packed_uchar2 = packed_vec<uchar, 2>;
using packed_uchar3 = packed_vec<uchar, 3>;
using packed_uchar4 = packed_vec<uchar, 4>;
using packed_short2 = packed_vec<short, 2>;
using packed_short3 = packed_vec<short, 3>;
using packed_short4 = packed_vec<short, 4>;
using packed_ushort2 = packed_vec<ushort, 2>;
using packed_ushort3 = packed_vec<ushort, 3>;
using packed_ushort4 = packed_vec<ushort, 4>;
using packed_int2 = packed_vec<int, 2>;
using packed_int3 = packed_vec<int, 3>;
using packed_int4 = packed_vec<int, 4>;
using packed_uint2 = packed_vec<uint, 2>;
using packed_uint3 = packed_vec<uint, 3>;
using packed_uint4 = packed_vec<uint, 4>;
using packed_long2 = packed_vec<long, 2>;
using packed_long3 = packed_vec<long, 3>;
using packed_long4 = packed_vec<long, 4>;
using packed_ulong2 = packed_vec<ulong, 2>;
using packed_ulong3 = packed_vec<ulong, 3>;
using packed_ulong4 = packed_vec<ulong, 4>;
using packed_half2 = packed_vec<half, 2>;
using packed_half3 = packed_vec<half, 3>;
using packed_half4 = packed_vec<half, 4>;
using packed_bfloat2 = packed_vec<bfloat, 2>;
using packed_bfloat3 = packed_vec<bfloat, 3>;
using packed_bfloat4 = packed_vec<bfloat, 4>;
using packed_float2 = packed_vec<float, 2>;
using packed_float3 = packed_vec<float, 3>;
using packed_float4 = packed_vec<float, 4>;

}  // namespace metal

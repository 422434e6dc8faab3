// Vectors: clang's ext_vector_type, which has Metal's sizes, alignment, swizzles and operators.
#pragma once

#include "traits.h"

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

using char2 = vec<char, 2>;
using char3 = vec<char, 3>;
using char4 = vec<char, 4>;
using uchar2 = vec<uchar, 2>;
using uchar3 = vec<uchar, 3>;
using uchar4 = vec<uchar, 4>;
using short2 = vec<short, 2>;
using short3 = vec<short, 3>;
using short4 = vec<short, 4>;
using ushort2 = vec<ushort, 2>;
using ushort3 = vec<ushort, 3>;
using ushort4 = vec<ushort, 4>;
using int2 = vec<int, 2>;
using int3 = vec<int, 3>;
using int4 = vec<int, 4>;
using uint2 = vec<uint, 2>;
using uint3 = vec<uint, 3>;
using uint4 = vec<uint, 4>;
using long2 = vec<long, 2>;
using long3 = vec<long, 3>;
using long4 = vec<long, 4>;
using ulong2 = vec<ulong, 2>;
using ulong3 = vec<ulong, 3>;
using ulong4 = vec<ulong, 4>;
using half2 = vec<half, 2>;
using half3 = vec<half, 3>;
using half4 = vec<half, 4>;
using bfloat2 = vec<bfloat, 2>;
using bfloat3 = vec<bfloat, 3>;
using bfloat4 = vec<bfloat, 4>;
using float2 = vec<float, 2>;
using float3 = vec<float, 3>;
using float4 = vec<float, 4>;

}  // namespace metal

namespace mslc {

// Element type and length of a vector. The length is 0 for all other types.
template <class V>
struct VectorTraits {
  using Element = V;
  static constexpr int length = 0;
};
template <class T, int N>
struct IsVector {
  using Element = T;
  static constexpr int length = N;
};
template <class T>
struct VectorTraits<T __attribute__((ext_vector_type(1)))> : IsVector<T, 1> {};
template <class T>
struct VectorTraits<T __attribute__((ext_vector_type(2)))> : IsVector<T, 2> {};
template <class T>
struct VectorTraits<T __attribute__((ext_vector_type(3)))> : IsVector<T, 3> {};
template <class T>
struct VectorTraits<T __attribute__((ext_vector_type(4)))> : IsVector<T, 4> {};
template <class V>
struct VectorTraits<const V> : VectorTraits<V> {};

template <class V>
using ElementOf = typename VectorTraits<V>::Element;
template <class V>
constexpr int length_of = VectorTraits<V>::length;
template <class V>
constexpr bool is_vector = length_of<V> != 0;

}  // namespace mslc

#include "bool_vec.h"
#include "convert.h"
#include "packed.h"

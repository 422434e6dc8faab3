// Vector constructors and casts. The rewriter turns float4(...), (float4)x and static_cast<T>(x)
// into these functions, because clang interprets them differently: a cast between vectors of equal
// size reinterprets the bits, and half and bfloat do not convert.
#pragma once

namespace mslc {

template <class To, class From>
MSLC_INLINE constexpr To convert_scalar(From value) {
  if constexpr (__is_same(To, bfloat) && __is_same(From, half))
    return static_cast<bfloat>(static_cast<float>(value));
  else if constexpr (__is_same(To, half) && __is_same(From, bfloat))
    return static_cast<half>(static_cast<float>(value));
  else
    return static_cast<To>(value);
}

template <class V, class A>
MSLC_INLINE constexpr void append(V& vector, int& position, const A& argument) {
  using E = ElementOf<V>;
  if constexpr (is_vector<A>)
    for (int i = 0; i < length_of<A>; ++i) vector[position++] = convert_scalar<E>(argument[i]);
  else
    vector[position++] = convert_scalar<E>(argument);
}

// V(a, b, ...) concatenates components, V(scalar) repeats one, and V(vector) converts.
template <class V>
MSLC_INLINE constexpr V make() {
  return V{};
}
template <class V, class A>
MSLC_INLINE constexpr V make(A argument) {
  if constexpr (__is_same(V, A)) {
    return argument;
  } else if constexpr (!is_vector<V>) {
    return static_cast<V>(argument);  // a class with the same name as a vector alias
  } else if constexpr (is_vector<A>) {
    static_assert(length_of<A> == length_of<V>, "vectors of different length do not convert");
    V vector = {};
    for (int i = 0; i < length_of<V>; ++i) vector[i] = convert_scalar<ElementOf<V>>(argument[i]);
    return vector;
  } else {
    V vector = {};
    const auto component = convert_scalar<ElementOf<V>>(static_cast<ElementOf<V>>(argument));
    for (int i = 0; i < length_of<V>; ++i) vector[i] = component;
    return vector;
  }
}
template <class V, class A, class B, class... Rest>
MSLC_INLINE constexpr V make(A first, B second, Rest... rest) {
  if constexpr (is_vector<V>) {
    V vector = {};
    int position = 0;
    append(vector, position, first);
    append(vector, position, second);
    (append(vector, position, rest), ...);
    return vector;
  } else {
    return V(first, second, rest...);
  }
}

// static_cast<To>(value). Takes the value by copy, because no reference can bind to a component of
// a vector.
template <class To, class From>
  requires(!__is_reference(To))
MSLC_INLINE constexpr To cast(From value) {
  using Plain = metal::remove_cv_t<To>;
  if constexpr (is_vector<Plain> && (is_vector<From> || mslc::is_arithmetic<From>))
    return make<Plain>(value);
  else if constexpr (mslc::is_arithmetic<Plain> && mslc::is_arithmetic<From>)
    return convert_scalar<Plain>(value);
  else
    return static_cast<To>(value);
}
template <class To, class From>
  requires __is_reference
(To) MSLC_INLINE constexpr To cast(From&& value) {
  return static_cast<To>(static_cast<From&&>(value));
}

// as_type<T>(x). The rewriter emits the qualified name, because as_type is a keyword and not a
// function.
template <class To, class From>
MSLC_INLINE constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of the same size");
  return __builtin_bit_cast(To, value);
}

}  // namespace mslc

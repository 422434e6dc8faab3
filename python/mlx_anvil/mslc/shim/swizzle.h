// Swizzles (v.xy, v.bgra) for the vectors that are structs: bool vectors and packed vectors.
//
// A swizzle is a property, not an object: reading v.xy calls get_xy, which returns a vector by
// value, and writing calls put_xy. So `a.xy = a.yx` reads all components before it writes any,
// `auto` and templates deduce a vector, and the vector stays trivially copyable.
#pragma once

namespace mslc {

// The vector of N components of type T. Specialised where clang has no such vector.
template <class T, int N>
struct AnyVector {
  using type = metal::vec<T, N>;
};

// A pattern of components as hexadecimal digits, with the first component in the highest digit.
constexpr int pattern_index(unsigned pattern, int length, int position) {
  return static_cast<int>(pattern >> 4 * (length - 1 - position) & 15);
}
constexpr bool has_duplicates(unsigned pattern, int length) {
  for (int i = 0; i < length; ++i)
    for (int j = 0; j < i; ++j)
      if (pattern_index(pattern, length, i) == pattern_index(pattern, length, j)) return true;
  return false;
}

template <int Length, class T>
MSLC_INLINE constexpr auto read_swizzle(const T* component, unsigned pattern) {
  typename AnyVector<T, Length>::type values = {};
  for (int i = 0; i < Length; ++i) values[i] = component[pattern_index(pattern, Length, i)];
  return values;
}
template <int Length, class T, class Values>
MSLC_INLINE constexpr Values write_swizzle(T* component, unsigned pattern, Values values) {
  for (int i = 0; i < Length; ++i) component[pattern_index(pattern, Length, i)] = values[i];
  return values;
}

// Base of a vector of N components, which stores them in an array `component`.
template <class Vector, class T, int N>
struct Swizzles;

// Defines one swizzle under its two names. `digits` are the component numbers.
#define MSLC_SWIZZLE(length, name, color, digits)                                            \
  MSLC_INLINE constexpr Values<length> get_##name() const {                                  \
    return read_swizzle<length>(static_cast<const Vector*>(this)->component, 0x##digits);    \
  }                                                                                          \
  MSLC_INLINE constexpr Values<length> put_##name(Values<length> values) __attribute__((     \
      diagnose_if(has_duplicates(0x##digits, length),                                        \
                  "vector is not assignable (contains duplicate components)", "error"))) {   \
    return write_swizzle<length>(static_cast<Vector*>(this)->component, 0x##digits, values); \
  }                                                                                          \
  __declspec(property(get = get_##name, put = put_##name)) Values<length> name;              \
  __declspec(property(get = get_##name, put = put_##name)) Values<length> color;

// MSLC_EACH_<level>_<N>(F, ...) is F(..., x, r, 0) F(..., y, g, 1) ... up to component N. Each
// level of nesting needs its own macro, because the preprocessor does not expand a macro inside
// itself.
#define MSLC_EACH_1_2(F, ...) F(__VA_ARGS__, x, r, 0) F(__VA_ARGS__, y, g, 1)
#define MSLC_EACH_2_2(F, ...) F(__VA_ARGS__, x, r, 0) F(__VA_ARGS__, y, g, 1)
#define MSLC_EACH_3_2(F, ...) F(__VA_ARGS__, x, r, 0) F(__VA_ARGS__, y, g, 1)
#define MSLC_EACH_4_2(F, ...) F(__VA_ARGS__, x, r, 0) F(__VA_ARGS__, y, g, 1)
#define MSLC_EACH_1_3(F, ...) MSLC_EACH_1_2(F, __VA_ARGS__) F(__VA_ARGS__, z, b, 2)
#define MSLC_EACH_2_3(F, ...) MSLC_EACH_2_2(F, __VA_ARGS__) F(__VA_ARGS__, z, b, 2)
#define MSLC_EACH_3_3(F, ...) MSLC_EACH_3_2(F, __VA_ARGS__) F(__VA_ARGS__, z, b, 2)
#define MSLC_EACH_4_3(F, ...) MSLC_EACH_4_2(F, __VA_ARGS__) F(__VA_ARGS__, z, b, 2)
#define MSLC_EACH_1_4(F, ...) MSLC_EACH_1_3(F, __VA_ARGS__) F(__VA_ARGS__, w, a, 3)
#define MSLC_EACH_2_4(F, ...) MSLC_EACH_2_3(F, __VA_ARGS__) F(__VA_ARGS__, w, a, 3)
#define MSLC_EACH_3_4(F, ...) MSLC_EACH_3_3(F, __VA_ARGS__) F(__VA_ARGS__, w, a, 3)
#define MSLC_EACH_4_4(F, ...) MSLC_EACH_4_3(F, __VA_ARGS__) F(__VA_ARGS__, w, a, 3)

// Generates every pattern of two, three and four letters. Each level appends a letter.
#define MSLC_LETTER_1(N, name, color, digits) MSLC_EACH_2_##N(MSLC_LETTER_2, N, name, color, digits)
#define MSLC_LETTER_2(N, name, color, digits, x, r, i) \
  MSLC_SWIZZLE(2, name##x, color##r, digits##i)        \
  MSLC_EACH_3_##N(MSLC_LETTER_3, N, name##x, color##r, digits##i)
#define MSLC_LETTER_3(N, name, color, digits, x, r, i) \
  MSLC_SWIZZLE(3, name##x, color##r, digits##i)        \
  MSLC_EACH_4_##N(MSLC_LETTER_4, N, name##x, color##r, digits##i)
#define MSLC_LETTER_4(N, name, color, digits, x, r, i) MSLC_SWIZZLE(4, name##x, color##r, digits##i)

#define MSLC_SWIZZLES(N)                                \
  template <class Vector, class T>                      \
  struct Swizzles<Vector, T, N> {                       \
    template <int Length>                               \
    using Values = typename AnyVector<T, Length>::type; \
    MSLC_EACH_1_##N(MSLC_LETTER_1, N)                   \
  };
MSLC_SWIZZLES(2)
MSLC_SWIZZLES(3)
MSLC_SWIZZLES(4)

#undef MSLC_SWIZZLES
#undef MSLC_SWIZZLE
#undef MSLC_LETTER_1
#undef MSLC_LETTER_2
#undef MSLC_LETTER_3
#undef MSLC_LETTER_4

}  // namespace mslc

// Lifts scalar functions to scalars and vectors by Metal's rules for arguments: scalars are
// broadcast to vectors, float and half keep their type, and bfloat is computed in float.
#pragma once

#include "target.h"

namespace mslc {

template <class T>
constexpr bool is_number =
    mslc::is_arithmetic<ElementOf<metal::remove_cv_t<T>>> && !__is_same(T, bool);
template <class T>
constexpr bool is_real = metal::is_floating_point_v<ElementOf<metal::remove_cv_t<T>>>;
template <class T>
constexpr bool is_whole = is_number<T> && !is_real<T>;

template <class... T>
concept Numbers = (is_number<T> && ...);
template <class... T>
concept Reals = Numbers<T...> && (is_real<T> || ...);
template <class... T>
concept Wholes = (is_whole<T> && ...);

template <class... T>
constexpr int common_length() {
  int length = 0;
  ((length = length_of<T> > length ? length_of<T> : length), ...);
  return length;
}

template <class T, int N>
struct ScalarOrVector {
  using type = metal::vec<T, N>;
};
template <class T>
struct ScalarOrVector<T, 0> {
  using type = T;
};

// The element type for real arguments: half if all of them are half.
template <class... T>
using RealElement =
    metal::conditional_t<((!is_real<T> || __is_same(ElementOf<T>, half)) && ...), half, float>;

template <class T>
MSLC_INLINE constexpr auto component(const T& value, int i) {
  if constexpr (is_vector<T>)
    return value[i];
  else
    return value;
}

// Applies `function` componentwise to the arguments, converted to `Element`. Vector results have
// the function's result type as element (a bool vector for bool).
template <class Element, class Function, class... T>
MSLC_INLINE constexpr auto map(Function function, T... arguments) {
  constexpr int length = common_length<T...>();
  if constexpr (length == 0) {
    return function(convert_scalar<Element>(arguments)...);
  } else {
    using Result = decltype(function(convert_scalar<Element>(component(arguments, 0))...));
    metal::conditional_t<__is_same(Result, bool), BoolVector<length>,
                         typename ScalarOrVector<Result, length>::type>
        results = {};
    for (int i = 0; i < length; ++i)
      results[i] = function(convert_scalar<Element>(component(arguments, i))...);
    return results;
  }
}

// For functions that exist in float only: half is converted to float and rounded once.
template <class Function, class... T>
MSLC_INLINE constexpr auto map_float(Function function, T... arguments) {
  using E = RealElement<T...>;
  return map<float>([=](auto... x) { return static_cast<E>(function(x...)); }, arguments...);
}

}  // namespace mslc

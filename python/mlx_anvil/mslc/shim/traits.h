// <metal_type_traits> and numeric_limits, limited to what public Metal source uses
// (docs/mslc-standard-library.md).
#pragma once

#include "address_space.h"
#include "types.h"

namespace mslc {

template <bool B, class T, class F>
struct Conditional {
  using type = T;
};
template <class T, class F>
struct Conditional<false, T, F> {
  using type = F;
};

}  // namespace mslc

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
using conditional_t = typename mslc::Conditional<B, T, F>::type;

template <class... B>
struct _disjunction : bool_constant<(false || ... || bool(B::value))> {};

template <class A, class B>
constexpr bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};

template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
using remove_pointer_t = __remove_pointer(T);
template <class T>
using make_unsigned_t = __make_unsigned(T);

}  // namespace metal

namespace mslc {

template <class T>
struct RemoveSpace {
  using type = T;
};
template <class T>
struct RemoveSpace<device T> {
  using type = T;
};
template <class T>
struct RemoveSpace<const device T> {
  using type = const T;
};
template <class T>
struct RemoveSpace<threadgroup T> {
  using type = T;
};
template <class T>
struct RemoveSpace<const threadgroup T> {
  using type = const T;
};
template <class T>
struct RemoveSpace<constant T> {
  using type = const T;
};

}  // namespace mslc

namespace metal {

template <class T>
using remove_addrspace_t = typename mslc::RemoveSpace<T>::type;

template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
constexpr bool is_floating_point_v =
    __is_floating_point(T) || __is_same(__remove_cv(T), half) || __is_same(__remove_cv(T), bfloat);
template <class T>
constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T>
constexpr bool is_signed_v = (is_integral_v<T> || is_floating_point_v<T>) && !__is_unsigned(T);
template <class A, class B>
constexpr bool is_convertible_v = __is_convertible(A, B);

template <class T>
T&& declval();

}  // namespace metal

namespace mslc {

template <class T>
constexpr bool is_arithmetic = metal::is_integral_v<T> || metal::is_floating_point_v<T>;

template <class T>
struct IntegerLimits {
  static constexpr bool is_specialized = true;
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr bool is_integer = true;
  static constexpr bool has_infinity = false;
  static constexpr int digits = sizeof(T) * 8 - is_signed;
  static constexpr T max() { return is_signed ? T((1ull << (sizeof(T) * 8 - 1)) - 1) : T(~0ull); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
  static constexpr T epsilon() { return T(0); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
};

template <class T, int Digits>
struct FloatLimits {
  static constexpr bool is_specialized = true;
  static constexpr bool is_signed = true;
  static constexpr bool is_integer = false;
  static constexpr bool has_infinity = true;
  static constexpr int digits = Digits;
  static constexpr T infinity() { return static_cast<T>(__builtin_inff()); }
  static constexpr T quiet_NaN() { return static_cast<T>(__builtin_nanf("")); }
  static constexpr T signaling_NaN() { return static_cast<T>(__builtin_nansf("")); }
  static constexpr T epsilon() { return static_cast<T>(2.0f / (1ull << Digits)); }
};

}  // namespace mslc

namespace metal {

template <class T>
struct numeric_limits {
  static constexpr bool is_specialized = false;
};
template <>
struct numeric_limits<char> : mslc::IntegerLimits<char> {};
template <>
struct numeric_limits<signed char> : mslc::IntegerLimits<signed char> {};
template <>
struct numeric_limits<uchar> : mslc::IntegerLimits<uchar> {};
template <>
struct numeric_limits<short> : mslc::IntegerLimits<short> {};
template <>
struct numeric_limits<ushort> : mslc::IntegerLimits<ushort> {};
template <>
struct numeric_limits<int> : mslc::IntegerLimits<int> {};
template <>
struct numeric_limits<uint> : mslc::IntegerLimits<uint> {};
template <>
struct numeric_limits<long> : mslc::IntegerLimits<long> {};
template <>
struct numeric_limits<ulong> : mslc::IntegerLimits<ulong> {};
template <>
struct numeric_limits<bool> : mslc::IntegerLimits<uchar> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
  static constexpr bool lowest() { return false; }
};
template <>
struct numeric_limits<float> : mslc::FloatLimits<float, 24> {
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float min() { return __FLT_MIN__; }
  static constexpr float lowest() { return -__FLT_MAX__; }
};
template <>
struct numeric_limits<half> : mslc::FloatLimits<half, 11> {
  static constexpr half max() { return static_cast<half>(65504.0f); }
  static constexpr half min() { return static_cast<half>(6.103515625e-5f); }
  static constexpr half lowest() { return static_cast<half>(-65504.0f); }
};
template <>
struct numeric_limits<bfloat> : mslc::FloatLimits<bfloat, 8> {
  static constexpr bfloat max() { return static_cast<bfloat>(0x1.FEp127f); }
  static constexpr bfloat min() { return static_cast<bfloat>(__FLT_MIN__); }
  static constexpr bfloat lowest() { return static_cast<bfloat>(-0x1.FEp127f); }
};

}  // namespace metal

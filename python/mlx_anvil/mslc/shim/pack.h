// <metal_pack>: vectors of numbers in [0, 1] (unorm) or [-1, 1] (snorm), packed into one integer
// with the first component in the lowest bits. Rounds to nearest even; NaN becomes 0.
#pragma once

#include "common.h"

namespace mslc {

// Widths of the components, starting at the lowest bits.
template <int... Bits>
struct PackedLayout {
  static constexpr int length = sizeof...(Bits);
  static constexpr int bits[] = {Bits...};
};
using Layout4x8 = PackedLayout<8, 8, 8, 8>;
using Layout2x16 = PackedLayout<16, 16>;
using Layout10a2 = PackedLayout<10, 10, 10, 2>;

constexpr float largest_code(int bits, bool is_signed) {
  return static_cast<float>((1u << (bits - is_signed)) - 1);
}

template <bool Signed>
MSLC_INLINE uint normalized_code(float value, int bits) {
  const float largest = largest_code(bits, Signed), smallest = Signed ? -largest : 0.0f;
  const float scaled = value * largest;
  const float bounded = scaled > largest ? largest : scaled > smallest ? scaled : smallest;
  const int code = value != value ? 0 : static_cast<int>(__builtin_rintf(bounded));
  return static_cast<uint>(code) & ((1u << bits) - 1);
}
template <bool Signed>
MSLC_INLINE float normalized_value(uint code, int bits) {
  if constexpr (!Signed) return static_cast<float>(code) / largest_code(bits, false);
  const int value = static_cast<int>(code << (32 - bits)) >> (32 - bits);
  const float scaled = static_cast<float>(value) / largest_code(bits, true);
  return scaled < -1.0f ? -1.0f : scaled;  // the lowest code represents a value below -1
}

template <class Layout, bool Signed, class V>
MSLC_INLINE uint pack(V values) {
  uint packed = 0;
  for (int i = 0, shift = 0; i < Layout::length; shift += Layout::bits[i++])
    packed |= normalized_code<Signed>(static_cast<float>(values[i]), Layout::bits[i]) << shift;
  return packed;
}
template <class Layout, bool Signed, class V>
MSLC_INLINE V unpack(uint packed) {
  V values = {};
  for (int i = 0, shift = 0; i < Layout::length; shift += Layout::bits[i++]) {
    const uint code = packed >> shift & ((1u << Layout::bits[i]) - 1);
    values[i] = static_cast<ElementOf<V>>(normalized_value<Signed>(code, Layout::bits[i]));
  }
  return values;
}

// The transfer functions of sRGB. Alpha, the last component, stays linear.
MSLC_INLINE float srgb_of_linear(float x) {
  return x <= 0.0031308f ? 12.92f * x : 1.055f * target::pow(x, 1.0f / 2.4f) - 0.055f;
}
MSLC_INLINE float linear_of_srgb(float x) {
  return x <= 0.04045f ? x / 12.92f : target::pow((x + 0.055f) / 1.055f, 2.4f);
}

}  // namespace mslc

namespace metal {

// For float and half: 4x8, 2x16 and 10a2 in both signs, and 565 (red in the highest bits).
#define MSLC_PACK(T, sign, is_signed, name, layout, N, Code)    \
  MSLC_INLINE Code pack_##T##_to_##sign##name(T##N v) {         \
    return static_cast<Code>(mslc::pack<layout, is_signed>(v)); \
  }                                                             \
  MSLC_INLINE T##N unpack_##sign##name##_to_##T(Code code) {    \
    return mslc::unpack<layout, is_signed, T##N>(code);         \
  }
#define MSLC_PACK_ALL(T)                                                                     \
  MSLC_PACK(T, unorm, false, 4x8, mslc::Layout4x8, 4, uint)                                  \
  MSLC_PACK(T, snorm, true, 4x8, mslc::Layout4x8, 4, uint)                                   \
  MSLC_PACK(T, unorm, false, 2x16, mslc::Layout2x16, 2, uint)                                \
  MSLC_PACK(T, snorm, true, 2x16, mslc::Layout2x16, 2, uint)                                 \
  MSLC_PACK(T, unorm, false, 10a2, mslc::Layout10a2, 4, uint)                                \
  MSLC_PACK(T, snorm, true, 10a2, mslc::Layout10a2, 4, uint)                                 \
  MSLC_INLINE ushort pack_##T##_to_unorm565(T##3 v) {                                        \
    using Layout = mslc::PackedLayout<5, 6, 5>;                                              \
    return static_cast<ushort>(mslc::pack<Layout, false>(T##3(v.zyx)));                      \
  }                                                                                          \
  MSLC_INLINE T##3 unpack_unorm565_to_##T(ushort code) {                                     \
    return mslc::unpack<mslc::PackedLayout<5, 6, 5>, false, T##3>(code).zyx;                 \
  }                                                                                          \
  MSLC_INLINE uint pack_##T##_to_srgb_unorm4x8(T##4 v) {                                     \
    float4 encoded = {0, 0, 0, static_cast<float>(v[3])};                                    \
    for (int i = 0; i < 3; ++i) encoded[i] = mslc::srgb_of_linear(static_cast<float>(v[i])); \
    return pack_float_to_unorm4x8(encoded);                                                  \
  }                                                                                          \
  MSLC_INLINE T##4 unpack_unorm4x8_srgb_to_##T(uint code) {                                  \
    const float4 encoded = unpack_unorm4x8_to_float(code);                                   \
    T##4 v = {0, 0, 0, static_cast<T>(encoded[3])};                                          \
    for (int i = 0; i < 3; ++i) v[i] = static_cast<T>(mslc::linear_of_srgb(encoded[i]));     \
    return v;                                                                                \
  }
MSLC_PACK_ALL(float)
MSLC_PACK_ALL(half)
#undef MSLC_PACK_ALL
#undef MSLC_PACK

}  // namespace metal

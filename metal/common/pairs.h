// Pairs of 16-bit floats in a word. PTX computes with both at once.
#pragma once

#include <metal_stdlib>

template <typename T>
METAL_FUNC uint pair_of(T value) {
  return as_type<uint>(metal::vec<T, 2>(value, value));
}

// a * b + c, for both elements. PTX rounds once; other targets round to float32 first.
template <typename T>
METAL_FUNC uint fma_pairs(uint a, uint b, uint c) {
#ifdef __MSLC_PTX__
  return mslc::fma_pairs<T>(a, b, c);
#else
  using Two = metal::vec<T, 2>;
  const float2 sum =
      metal::fma(float2(as_type<Two>(a)), float2(as_type<Two>(b)), float2(as_type<Two>(c)));
  return as_type<uint>(Two(static_cast<T>(sum.x), static_cast<T>(sum.y)));
#endif
}

template <typename T>
METAL_FUNC uint multiply_pairs(uint a, uint b) {
  return fma_pairs<T>(a, b, 0x80008000u);  // adding -0 changes nothing
}

// Bytes of `a` (0 to 3) and `b` (4 to 7): byte i of the result is the one whose number is in the
// four bits of `which` from 4 i on.
METAL_FUNC uint select_bytes(uint a, uint b, uint which) {
#ifdef __MSLC_PTX__
  return mslc::select_bytes(a, b, which);
#else
  const ulong both = ulong(b) << 32 | a;
  uint result = 0;
  for (uint i = 0; i < 4; ++i) {
    result |= uint(both >> (8 * (which >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return result;
#endif
}

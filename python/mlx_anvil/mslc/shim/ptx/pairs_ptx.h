// Arithmetic on pairs of 16-bit floats in a word, rounded once, and a permutation of bytes. Metal
// has none of them for bfloat or in one instruction; kernels use them through metal/common/pairs.h.
#pragma once

namespace mslc {

// a * b + c.
template <class T>
MSLC_INLINE uint fma_pairs(uint a, uint b, uint c) {
  uint result;
  if constexpr (__is_same(T, half))
    __asm__("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  else
    __asm__("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Byte i is the one of `a` (0 to 3) and `b` (4 to 7) that bits 4 i to 4 i + 2 of `which` name.
MSLC_INLINE uint select_bytes(uint a, uint b, uint which) {
  uint result;
  __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(which));
  return result;
}

}  // namespace mslc

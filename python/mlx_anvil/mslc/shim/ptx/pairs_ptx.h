// Arithmetic on pairs of 16-bit floats in a word, rounded once. Metal has none for bfloat; kernels
// use it through metal/common/pairs.h.
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

}  // namespace mslc

// A logit and its index in one 64-bit integer; the larger is the better. Shared by C++ and MSL.
//
// The upper half orders logits: by value, with -0 equal to 0, and NaN above all, as in mx.argmax.
// The lower half is the complement of the index, so that the first of equal logits wins. No two
// candidates of a row are equal, so the order of comparisons cannot change the result. 0 means no
// candidate and is below all others.
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

// `bits` are those of the logit in float32.
inline uint64_t candidate_of(uint32_t bits, uint32_t index) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t order = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  order = magnitude == 0 ? 0x80000000u : order;
  order = magnitude > 0x7f800000u ? 0xffffffffu : order;
  return static_cast<uint64_t>(order) << 32 | static_cast<uint64_t>(~index);
}

inline uint32_t index_of(uint64_t candidate) {
  return ~static_cast<uint32_t>(candidate);
}

// Returns the bits of the logit. Every NaN becomes the same NaN.
inline uint32_t value_bits_of(uint64_t candidate) {
  const uint32_t order = static_cast<uint32_t>(candidate >> 32);
  return order >> 31 != 0 ? order & 0x7fffffffu : ~order;
}

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

// A logit and where it is, as one number: the greater, the better. Read by C++ and MSL alike.
//
// The upper half has the logits' order: numbers by size, with -0 equal to 0, and NaN above them
// all, as mx.argmax has it. The lower half is the complement of the index, so that of equal logits
// the first wins. No two candidates of a row are equal, so that the best of them do not depend on
// the order in which they are compared. 0 is no candidate, and below them all.
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

// `bits`: of the logit in float32.
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

// Of the logit; of a NaN, those of one.
inline uint32_t value_bits_of(uint64_t candidate) {
  const uint32_t order = static_cast<uint32_t>(candidate >> 32);
  return order >> 31 != 0 ? order & 0x7fffffffu : ~order;
}

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

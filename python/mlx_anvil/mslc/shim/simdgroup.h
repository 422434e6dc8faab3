// <metal_simdgroup> and the barriers.
#pragma once

#include "group.h"

namespace metal {

MSLC_INLINE void threadgroup_barrier(mem_flags flags, MSLC_SITE) {
  mslc::barrier(MSLC_SCOPE_THREADGROUP, flags, site);
}
MSLC_INLINE void simdgroup_barrier(mem_flags flags, MSLC_SITE) {
  mslc::barrier(MSLC_SCOPE_SIMDGROUP, flags, site);
}

MSLC_GROUP_FUNCTIONS(simd, 32)

// The compiler's internal names, which MLX's bfloat overloads use.

MSLC_INLINE ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return static_cast<ushort>(mslc::lane_id());
}
MSLC_INLINE ushort __metal_get_simdgroup_size(ushort) {
  return 32;
}

#define MSLC_INTERNAL_SIMD(name)                        \
  template <class T, class... Rest>                     \
  MSLC_INLINE T __metal_##name(T value, Rest... rest) { \
    return name(value, rest...);                        \
  }
MSLC_INTERNAL_SIMD(simd_broadcast)
MSLC_INTERNAL_SIMD(simd_shuffle)
MSLC_INTERNAL_SIMD(simd_shuffle_xor)
MSLC_INTERNAL_SIMD(simd_shuffle_up)
MSLC_INTERNAL_SIMD(simd_shuffle_down)
MSLC_INTERNAL_SIMD(simd_shuffle_rotate_up)
MSLC_INTERNAL_SIMD(simd_shuffle_rotate_down)
MSLC_INTERNAL_SIMD(simd_sum)
MSLC_INTERNAL_SIMD(simd_product)
MSLC_INTERNAL_SIMD(simd_max)
MSLC_INTERNAL_SIMD(simd_min)
MSLC_INTERNAL_SIMD(simd_xor)
MSLC_INTERNAL_SIMD(simd_prefix_inclusive_sum)
MSLC_INTERNAL_SIMD(simd_prefix_exclusive_sum)
MSLC_INTERNAL_SIMD(simd_prefix_inclusive_product)
MSLC_INTERNAL_SIMD(simd_prefix_exclusive_product)
#undef MSLC_INTERNAL_SIMD
template <class T>
MSLC_INLINE T __metal_simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo) {
  return simd_shuffle_and_fill_up(value, fill, delta, modulo);
}
template <class T>
MSLC_INLINE T __metal_simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo) {
  return simd_shuffle_and_fill_down(value, fill, delta, modulo);
}

}  // namespace metal

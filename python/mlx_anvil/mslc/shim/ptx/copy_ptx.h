// Copies from device to threadgroup memory that run while their lane goes on: cp.async. Metal has
// no such thing; kernels use it by way of metal/common/async_copy.h.
#pragma once

namespace mslc {

// Of 4, 8 or 16 bytes, aligned. Those of 16 do not pass through the first-level cache.
template <class T>
MSLC_INLINE void start_copy(threadgroup T* to, const device T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "what the machine can copy");
  if constexpr (sizeof(T) == 16)
    __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "l"(to), "l"(from) : "memory");
  else
    __asm__ volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                     :
                     : "l"(to), "l"(from), "n"(sizeof(T))
                     : "memory");
}

// Zeros where `exists` is false, and nothing is read then. Of 16 bytes.
template <class T>
MSLC_INLINE void start_copy(threadgroup T* to, const device T* from, bool exists) {
  static_assert(sizeof(T) == 16, "others are not asked for");
  __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                   :
                   : "l"(to), "l"(from), "r"(exists ? 16 : 0)
                   : "memory");
}

// Those that the lane has started since the last call become one group.
MSLC_INLINE void end_copies() {
  __asm__ volatile("cp.async.commit_group;" ::: "memory");
}

// Until no more than the last `pending` of the lane's groups are under way.
template <int pending>
MSLC_INLINE void wait_for_copies() {
  __asm__ volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
}

}  // namespace mslc

// Asynchronous copies from device to threadgroup memory (cp.async). Metal has no equivalent;
// kernels use them through metal/common/async_copy.h.
#pragma once

namespace mslc {

// Starts an aligned copy of 4, 8 or 16 bytes. Copies of 16 bytes bypass the L1 cache.
template <class T>
MSLC_INLINE void start_copy(threadgroup T* to, const device T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "a copy has 4, 8 or 16 bytes");
  if constexpr (sizeof(T) == 16)
    __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "l"(to), "l"(from) : "memory");
  else
    __asm__ volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                     :
                     : "l"(to), "l"(from), "n"(sizeof(T))
                     : "memory");
}

// Starts a copy of 16 bytes. If `exists` is false, it writes zeros and reads nothing.
template <class T>
MSLC_INLINE void start_copy(threadgroup T* to, const device T* from, bool exists) {
  static_assert(sizeof(T) == 16, "a conditional copy has 16 bytes");
  __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                   :
                   : "l"(to), "l"(from), "r"(exists ? 16 : 0)
                   : "memory");
}

// Makes a group of the copies that the lane has started since the last call.
MSLC_INLINE void end_copies() {
  __asm__ volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last `pending` of the lane's groups are incomplete.
template <int pending>
MSLC_INLINE void wait_for_copies() {
  __asm__ volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
}

}  // namespace mslc

// Copies from device to threadgroup memory that run while their thread goes on, where the GPU has
// such: as PTX. Elsewhere they are done when they are started.
//
// A thread's copies are waited for in groups; others see them after the next barrier.
#pragma once

#include <metal_stdlib>

// Of a vector of 4, 8 or 16 bytes.
template <typename Vector>
METAL_FUNC void start_copy(threadgroup Vector* to, const device Vector* from) {
#ifdef __MSLC_PTX__
  mslc::start_copy(to, from);
#else
  *to = *from;
#endif
}

// Of a vector of 16 bytes; where it does not exist, zeros.
template <typename Vector>
METAL_FUNC void start_copy(threadgroup Vector* to, const device Vector* from, bool exists) {
#ifdef __MSLC_PTX__
  mslc::start_copy(to, from, exists);
#else
  *to = exists ? *from : Vector(0);
#endif
}

// Ends a group, of the copies since the one before.
METAL_FUNC void end_copies() {
#ifdef __MSLC_PTX__
  mslc::end_copies();
#endif
}

// Until no more than the last kPending groups are under way.
template <int kPending>
METAL_FUNC void wait_for_copies() {
#ifdef __MSLC_PTX__
  mslc::wait_for_copies<kPending>();
#endif
}

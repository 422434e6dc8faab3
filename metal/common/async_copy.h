// Asynchronous copies from device to threadgroup memory. PTX has them (cp.async): the thread goes
// on while the copy runs. On other targets each copy completes when it starts.
//
// A thread waits for its own copies in groups. Other threads see the data after the next barrier.
#pragma once

#include <metal_stdlib>

// Copies a vector of 4, 8 or 16 bytes.
template <typename Vector>
METAL_FUNC void start_copy(threadgroup Vector* to, const device Vector* from) {
#ifdef __MSLC_PTX__
  mslc::start_copy(to, from);
#else
  *to = *from;
#endif
}

// Copies a vector of 16 bytes, or writes zeros if it does not exist.
template <typename Vector>
METAL_FUNC void start_copy(threadgroup Vector* to, const device Vector* from, bool exists) {
#ifdef __MSLC_PTX__
  mslc::start_copy(to, from, exists);
#else
  *to = exists ? *from : Vector(0);
#endif
}

// Closes a group: the copies started since the previous group.
METAL_FUNC void end_copies() {
#ifdef __MSLC_PTX__
  mslc::end_copies();
#endif
}

// Waits until at most the last kPending groups are in flight.
template <int kPending>
METAL_FUNC void wait_for_copies() {
#ifdef __MSLC_PTX__
  mslc::wait_for_copies<kPending>();
#endif
}

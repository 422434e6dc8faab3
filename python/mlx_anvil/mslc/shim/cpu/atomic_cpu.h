// Atomic primitives of the CPU target. Workers run threadgroups in parallel, so these are the
// machine's atomic operations, relaxed as in Metal. T may have an address space.
#pragma once

namespace mslc::target {

template <class P, class T>
MSLC_INLINE T* plain_pointer(P pointer) {
  return (T*)(ulong)pointer;
}

template <class T, class P>
MSLC_INLINE T atomic_load(P pointer) {
  T value;
  __atomic_load(plain_pointer<P, T>(pointer), &value, __ATOMIC_RELAXED);
  return value;
}

template <class T, class P>
MSLC_INLINE void atomic_store(P pointer, T value) {
  __atomic_store(plain_pointer<P, T>(pointer), &value, __ATOMIC_RELAXED);
}

template <class T, class P>
MSLC_INLINE T atomic_exchange(P pointer, T value) {
  T old;
  __atomic_exchange(plain_pointer<P, T>(pointer), &value, &old, __ATOMIC_RELAXED);
  return old;
}

template <class T, class P>
MSLC_INLINE bool atomic_compare_exchange(P pointer, T& expected, T desired) {
  return __atomic_compare_exchange(plain_pointer<P, T>(pointer), &expected, &desired, false,
                                   __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// Replaces *pointer by Op::apply(*pointer, value) and returns the old value.
template <class Op, class T, class P>
MSLC_INLINE T atomic_fetch(P pointer, T value) {
  T old = atomic_load<T>(pointer);
  while (!atomic_compare_exchange<T>(pointer, old, T(Op::apply(old, value)))) {
  }
  return old;
}

}  // namespace mslc::target

// Atomic primitives of the GPU targets. Like Metal's, they are relaxed and have device scope.
#pragma once

namespace mslc::target {

// Returns a generic address. The compiler infers its memory again and emits the atomics of that
// memory.
template <class P, class T>
MSLC_INLINE T* plain_pointer(P pointer) {
  return (T*)pointer;
}

template <class T, class P>
MSLC_INLINE T atomic_load(P pointer) {
  T value;
  __scoped_atomic_load(plain_pointer<P, T>(pointer), &value, __ATOMIC_RELAXED,
                       __MEMORY_SCOPE_DEVICE);
  return value;
}

template <class T, class P>
MSLC_INLINE void atomic_store(P pointer, T value) {
  __scoped_atomic_store(plain_pointer<P, T>(pointer), &value, __ATOMIC_RELAXED,
                        __MEMORY_SCOPE_DEVICE);
}

template <class T, class P>
MSLC_INLINE T atomic_exchange(P pointer, T value) {
  T old;
  __scoped_atomic_exchange(plain_pointer<P, T>(pointer), &value, &old, __ATOMIC_RELAXED,
                           __MEMORY_SCOPE_DEVICE);
  return old;
}

template <class T, class P>
MSLC_INLINE bool atomic_compare_exchange(P pointer, T& expected, T desired) {
  return __scoped_atomic_compare_exchange(plain_pointer<P, T>(pointer), &expected, &desired, false,
                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                          __MEMORY_SCOPE_DEVICE);
}

// Replaces *pointer by Op::apply(*pointer, value) and returns the old value. Operations without an
// instruction loop over compare-exchange.
template <class Op, class T, class P>
MSLC_INLINE T atomic_fetch(P pointer, T value) {
  T* const plain = plain_pointer<P, T>(pointer);
  constexpr bool whole = __is_integral(T);
  if constexpr (__is_same(Op, Add)) {
    return __scoped_atomic_fetch_add(plain, value, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else if constexpr (whole && __is_same(Op, Max)) {
    return __scoped_atomic_fetch_max(plain, value, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else if constexpr (whole && __is_same(Op, Min)) {
    return __scoped_atomic_fetch_min(plain, value, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else if constexpr (whole && __is_same(Op, And)) {
    return __scoped_atomic_fetch_and(plain, value, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else if constexpr (whole && __is_same(Op, Or)) {
    return __scoped_atomic_fetch_or(plain, value, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else if constexpr (whole && __is_same(Op, Xor)) {
    return __scoped_atomic_fetch_xor(plain, value, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else {
    T old = atomic_load<T>(pointer);
    while (!atomic_compare_exchange<T>(pointer, old, T(Op::apply(old, value)))) {
    }
    return old;
  }
}

}  // namespace mslc::target

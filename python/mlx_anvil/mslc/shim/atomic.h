// <metal_atomic>.
#pragma once

#include "simdgroup.h"

namespace metal {

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};

template <class T>
struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "Metal has atomics of 4 and 8 bytes");
  atomic() = default;
  T value;
};
template <>
struct atomic<bool> {
  atomic() = default;
  uint value;
};

using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;

MSLC_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace metal

// One definition for both memories: P is a pointer to atomic<T>.
namespace mslc {
template <class P>
struct AtomicPointer;
template <class T>
struct AtomicPointer<device metal::atomic<T>*> {
  using Value = T;
};
template <class T>
struct AtomicPointer<volatile device metal::atomic<T>*> {
  using Value = T;
};
template <class T>
struct AtomicPointer<const device metal::atomic<T>*> {
  using Value = T;
};
template <class T>
struct AtomicPointer<const volatile device metal::atomic<T>*> {
  using Value = T;
};
template <class T>
struct AtomicPointer<threadgroup metal::atomic<T>*> {
  using Value = T;
};
template <class T>
struct AtomicPointer<volatile threadgroup metal::atomic<T>*> {
  using Value = T;
};
template <class T>
struct AtomicPointer<const threadgroup metal::atomic<T>*> {
  using Value = T;
};
template <class T>
struct AtomicPointer<const volatile threadgroup metal::atomic<T>*> {
  using Value = T;
};
template <class P>
using AtomicValue = typename AtomicPointer<P>::Value;

struct Subtract {
  template <class T>
  static T apply(T a, T b) {
    return a - b;
  }
};
}  // namespace mslc

namespace metal {

template <class P, class T = mslc::AtomicValue<P>>
MSLC_INLINE T atomic_load_explicit(P object, memory_order) {
  return static_cast<T>(mslc::target::atomic_load<decltype(atomic<T>::value)>(&object->value));
}
template <class P, class V, class T = mslc::AtomicValue<P>>
MSLC_INLINE void atomic_store_explicit(P object, V value, memory_order) {
  mslc::target::atomic_store<decltype(atomic<T>::value)>(&object->value, static_cast<T>(value));
}
template <class P, class V, class T = mslc::AtomicValue<P>>
MSLC_INLINE T atomic_exchange_explicit(P object, V value, memory_order) {
  return static_cast<T>(mslc::target::atomic_exchange<decltype(atomic<T>::value)>(
      &object->value, static_cast<T>(value)));
}
// In Metal the weak form may fail spuriously. Failing only when the value differs is allowed.
template <class P, class V, class T = mslc::AtomicValue<P>>
MSLC_INLINE bool atomic_compare_exchange_weak_explicit(
    P object, thread T* expected, V desired, memory_order, memory_order) {
  mslc::step();
  return mslc::target::atomic_compare_exchange<T>(&object->value, *expected,
                                                  static_cast<T>(desired));
}

#define MSLC_ATOMIC_FETCH(name, Op)                                                  \
  template <class P, class V, class T = mslc::AtomicValue<P>>                        \
  MSLC_INLINE T atomic_fetch_##name##_explicit(P object, V value, memory_order) {    \
    return mslc::target::atomic_fetch<Op, T>(&object->value, static_cast<T>(value)); \
  }
MSLC_ATOMIC_FETCH(add, mslc::Add)
MSLC_ATOMIC_FETCH(sub, mslc::Subtract)
MSLC_ATOMIC_FETCH(max, mslc::Max)
MSLC_ATOMIC_FETCH(min, mslc::Min)
MSLC_ATOMIC_FETCH(and, mslc::And)
MSLC_ATOMIC_FETCH(or, mslc::Or)
MSLC_ATOMIC_FETCH(xor, mslc::Xor)
#undef MSLC_ATOMIC_FETCH

// The 8-byte minimum and maximum of Metal return no result.
template <class P, class V, class T = mslc::AtomicValue<P>>
MSLC_INLINE void atomic_max_explicit(P object, V value, memory_order order) {
  atomic_fetch_max_explicit(object, value, order);
}
template <class P, class V, class T = mslc::AtomicValue<P>>
MSLC_INLINE void atomic_min_explicit(P object, V value, memory_order order) {
  atomic_fetch_min_explicit(object, value, order);
}

}  // namespace metal

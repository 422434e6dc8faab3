// <metal_array>, uniform, logging and the other parts of metal_stdlib that kernels use.
#pragma once

#include "atomic.h"

namespace metal {

template <class T, size_t N>
struct array {
  T elements[N];

  constexpr T& operator[](size_t i) { return elements[i]; }
  constexpr const T& operator[](size_t i) const { return elements[i]; }
  constexpr T* data() { return elements; }
  constexpr const T* data() const { return elements; }
  static constexpr size_t size() { return N; }
};

// A value that is the same in all threads. Only Metal's compiler uses that promise.
template <class T>
using uniform = T;
template <class T>
MSLC_INLINE constexpr T make_uniform(T value) {
  return value;
}

// Messages from kernels are discarded here.
struct os_log {
  constexpr os_log(const char*, const char*) {}
  template <class... Args>
  void log(const char*, Args...) const {}
  template <class... Args>
  void log_debug(const char*, Args...) const {}
  template <class... Args>
  void log_info(const char*, Args...) const {}
  template <class... Args>
  void log_error(const char*, Args...) const {}
};

}  // namespace metal

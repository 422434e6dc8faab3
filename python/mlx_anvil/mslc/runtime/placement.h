// Where objects are placed. Without <new>, which the freestanding build does not have.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

namespace mslc {

struct Here {
  void* at;
};

}  // namespace mslc

inline void* operator new(size_t, mslc::Here here) noexcept {
  return here.at;
}

namespace mslc {

template <class T>
T* create() {
  void* memory = malloc(sizeof(T));
  if (!memory) abort();
  return new (Here{memory}) T();
}

// The first address from `start` on that is a multiple of `alignment`, a power of two, and not of
// twice that: a kernel that needs more than it has been promised must not be lucky.
inline uintptr_t barely_aligned(uintptr_t start, size_t alignment) {
  return ((start + alignment - 1) & ~(2 * uintptr_t{alignment} - 1)) + alignment;
}

}  // namespace mslc

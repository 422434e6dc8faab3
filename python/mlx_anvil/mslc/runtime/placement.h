// Object placement without <new>, which the freestanding build lacks.
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

// Returns the first address from `start` on that is a multiple of `alignment`, a power of two, but
// not of twice that. This exposes kernels that rely on more alignment than they are promised.
inline uintptr_t barely_aligned(uintptr_t start, size_t alignment) {
  return ((start + alignment - 1) & ~(2 * uintptr_t{alignment} - 1)) + alignment;
}

}  // namespace mslc

// Objects in memory from malloc, without <new>, which the freestanding build does not have.
#pragma once

#include <stddef.h>
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

}  // namespace mslc

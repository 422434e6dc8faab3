// Assertions of the conformance check (passes/conformance.py), evaluated by the compiler.
#pragma once

#include "vec.h"

namespace mslc {

// In Metal, a struct has an assignment operator for each address space, so a bare list may be
// ambiguous. Vectors and scalars have only one.
template <class T>
struct ListAssigned {
  static_assert(!__is_class(T) || is_vector<T>,
                "assignment of a bare braced list to a struct may be ambiguous: name its type");
};
#define MSLC_LIST_ASSIGNED(...)                                                              \
  (static_cast<void>(sizeof(::mslc::ListAssigned<__remove_cvref(decltype((__VA_ARGS__)))>)), \
   __VA_ARGS__)

template <class T>
constexpr int space_of = 0;
template <class T>
constexpr int space_of<device T> = 1;
template <class T>
constexpr int space_of<const device T> = 1;
template <class T>
constexpr int space_of<threadgroup T> = 2;
template <class T>
constexpr int space_of<const threadgroup T> = 2;
template <class T>
constexpr int space_of<constant T> = 3;

// The operand of a cast to a pointer with an address space. Arrays decay to pointers.
template <class To, class From>
MSLC_INLINE constexpr From cast_from(From value) {
  if constexpr (__is_pointer(From))
    static_assert(space_of<__remove_pointer(To)> == space_of<__remove_pointer(From)>,
                  "a cast cannot change the address space of a pointer");
  return value;
}

}  // namespace mslc

// GPUs other than Apple's M5 have no instruction for matmul2d: kernels that use it do not compile.
#pragma once

#include "../target.h"

namespace mslc {

template <class T>
MSLC_INLINE void make_implausible(T&) {
  static_assert(sizeof(T) == 0,
                "cooperative tensors and matmul2d run in the simulator only, not on this target");
}
template <class T>
MSLC_INLINE T implausible() {
  return T(0);
}
MSLC_INLINE void require_element(uint, uint) {}
MSLC_INLINE void tensor_operation(bool, const Site*) {}
template <auto Product, class Left, class Right, class Destination>
MSLC_INLINE void multiply_cooperative(Left&, Right&, Destination&, const Site*) {}

}  // namespace mslc

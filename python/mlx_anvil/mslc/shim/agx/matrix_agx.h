// 8x8 matrices: one instruction takes three pairs a lane and gives one, as Apple's does. Mesa does
// not know that instruction, so what it costs is an assumption (tools/agx/mesa.patch).
#pragma once

#include "../matrix_layout.h"

namespace mslc {

template <class T>
MSLC_INLINE mslc_float2 float_pair(metal::vec<T, 2> pair) {
  return mslc_float2{static_cast<float>(pair.x), static_cast<float>(pair.y)};
}

// Of half, or of float: an M1 or M2 has no product of bfloat, which is converted.
template <class D, class A, class B, class C>
MSLC_INLINE metal::vec<D, 2> matrix_multiply_accumulate(metal::vec<A, 2> a,
                                                        metal::vec<B, 2> b,
                                                        metal::vec<C, 2> c,
                                                        const Site*) {
  constexpr bool halves = __is_same(A, half) && __is_same(B, half);
  if constexpr (halves && __is_same(C, half)) {
    const mslc_half2 d =
        nir_matrix_fma_agx__h(mslc_half2{a.x, a.y}, mslc_half2{b.x, b.y}, mslc_half2{c.x, c.y});
    return {static_cast<D>(d.x), static_cast<D>(d.y)};
  } else {
    mslc_float2 d;
    if constexpr (halves)
      d = nir_matrix_fma_agx__hf(mslc_half2{a.x, a.y}, mslc_half2{b.x, b.y}, float_pair(c));
    else
      d = nir_matrix_fma_agx__f(float_pair(a), float_pair(b), float_pair(c));
    return {static_cast<D>(d.x), static_cast<D>(d.y)};
  }
}

}  // namespace mslc

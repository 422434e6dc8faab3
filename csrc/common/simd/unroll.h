// Loops whose indices are compile-time constants. For kernel files only (see simd.h).
#pragma once

#include <type_traits>
#include <utility>

#include "common/simd/simd.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Arrays stay in registers only if unrolled loops are inlined. Sanitizer builds do not inline:
// checks in every copy would take minutes to compile.
#if defined(__SANITIZE_ADDRESS__)
#define MLX_ANVIL_UNROLLED inline
#else
#define MLX_ANVIL_UNROLLED [[gnu::always_inline]] inline
#endif

// Calls body(std::integral_constant<int, 0>) and so on, up to kCount.
template <class Body, int... kIndex>
MLX_ANVIL_UNROLLED void unroll_over(Body body, std::integer_sequence<int, kIndex...>) {
  (body(std::integral_constant<int, kIndex>()), ...);
}
template <int kCount, class Body>
MLX_ANVIL_UNROLLED void unroll(Body body) {
  unroll_over(body, std::make_integer_sequence<int, kCount>());
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

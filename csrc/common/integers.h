// Integer arithmetic for tiles and grids. Always inlined, because kernel files use it too (isa.h).
#pragma once

#include <cstdint>

namespace mlx_anvil {

[[gnu::always_inline]] constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The smallest multiple of `multiple` that is at least `a`.
[[gnu::always_inline]] constexpr int64_t round_up(int64_t a, int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}

[[gnu::always_inline]] constexpr int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
[[gnu::always_inline]] constexpr int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

}  // namespace mlx_anvil

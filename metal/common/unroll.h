// Arrays stay in registers only if every index is a compile-time constant, so their loops are
// unrolled.
#pragma once

#define MLX_ANVIL_UNROLL _Pragma("clang loop unroll(full)")
#define MLX_ANVIL_NO_UNROLL _Pragma("clang loop unroll(disable)")

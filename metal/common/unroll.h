// Arrays stay in registers only where every index is a constant, and so every loop unrolled.
#pragma once

#define MLX_ANVIL_UNROLL _Pragma("clang loop unroll(full)")
#define MLX_ANVIL_NO_UNROLL _Pragma("clang loop unroll(disable)")

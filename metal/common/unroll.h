// Arrays stay in registers only if every index is a compile-time constant, so their loops are
// unrolled. In PTX a function constant is none. Where one decides, metal::select() chooses between
// two elements: of two branches that load them, the compiler may make one load with an index.
#pragma once

#define MLX_ANVIL_UNROLL _Pragma("clang loop unroll(full)")
#define MLX_ANVIL_NO_UNROLL _Pragma("clang loop unroll(disable)")

#pragma once

#include <cstdint>

namespace mlx_anvil {

// Storage of the two 16-bit floating-point formats. They carry no arithmetic on purpose: kernels
// widen to float32 at the edges (simd.h). Their bits are those of mlx::core::float16_t and
// bfloat16_t.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

}  // namespace mlx_anvil

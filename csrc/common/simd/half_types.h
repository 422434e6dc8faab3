#pragma once

#include <cstdint>

namespace mlx_anvil {

// Storage types of the two 16-bit floating-point formats, with the bits of mlx::core::float16_t and
// bfloat16_t. They have no arithmetic: kernels convert to float32 on load and back on store
// (simd.h).
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

}  // namespace mlx_anvil

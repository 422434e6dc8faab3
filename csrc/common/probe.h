#pragma once

#include <cstdint>

#include "common/isa.h"

namespace mlx_anvil {

// Lets tests reach the vectorised functions of simd_math.h and simd.h in every build of them, and
// benchmarks the copy that bandwidth is measured against.
struct Probe {
  using Map = void (*)(const float* x, float* out, int64_t count);
  Map exp;
  Map exp_nonpositive;
  Map exp_nonpositive_float16;
  Map exp_nonpositive_bfloat16;
  Map exp2_bounded;
  Map exp2_bounded_float16;
  Map tanh;
  Map through_float16;  // rounded to float16 and widened again
  Map through_bfloat16;
  Map stream_copy;  // past the cache

  // Reads everything as fast as memory gives it; what it returns depends on every element.
  float (*read)(const float* x, int64_t count);
};

MLX_ANVIL_DECLARE_KERNELS(Probe, probe)

}  // namespace mlx_anvil

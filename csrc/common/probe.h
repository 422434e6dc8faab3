// Test and benchmark access to the vectorised functions of simd/math.h and simd/simd.h.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace mlx_anvil {

// Tests call these functions in every build. Benchmarks measure copy bandwidth with stream_copy.
struct Probe {
  using Map = void (*)(const float* x, float* out, int64_t count);
  Map exp;
  Map exp_nonpositive;
  Map exp_nonpositive_float16;
  Map exp_nonpositive_bfloat16;
  Map exp2_bounded;
  Map exp2_bounded_float16;
  Map tanh;
  Map through_float16;  // rounds to float16 and widens again
  Map through_bfloat16;
  Map stream_copy;  // with streaming stores

  // Reads at full memory bandwidth. The result depends on every element.
  float (*read)(const float* x, int64_t count);
};

MLX_ANVIL_DECLARE_KERNELS(Probe, probe)

}  // namespace mlx_anvil

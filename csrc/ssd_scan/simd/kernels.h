// Arguments of ssd_scan's own CPU kernels. Plain data (see common/isa.h).
#pragma once

#include "common/dtype.h"
#include "common/isa.h"

namespace mlx_anvil {

struct SsdStepsArgs {
  const void* dt;  // rows of heads
  int64_t dt_batch, dt_step;
  const float *a, *bias;   // [heads]; bias null: none
  const int32_t* lengths;  // [batch]; null: all steps
  float *decays, *steps;   // [batch, length, heads]
  int64_t length, heads;
  bool softplus;
  float least, most;
};

// Computes rows [begin, end) of batch * length.
using SsdStepsKernel = void (*)(const SsdStepsArgs& args, int64_t begin, int64_t end);

MLX_ANVIL_DECLARE_KERNELS(PerDtype<SsdStepsKernel>, ssd_steps_kernels)

}  // namespace mlx_anvil

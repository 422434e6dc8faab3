// Arguments of ssd_scan's own CPU kernels. Plain data (see common/isa.h).
#pragma once

#include "common/dtype.h"
#include "common/isa.h"

namespace mlx_anvil {

struct SsdStepsArgs {
  const void* dt;  // rows of heads
  int64_t dt_batch, dt_step;
  const float *a, *bias;  // rows of heads; bias null: none
  int64_t a_batch, bias_batch;
  const int32_t* lengths;  // [batch]; null: all steps
  int64_t length, heads;
  bool softplus;
  float least, most;
  // [batch, length, heads]: the outputs of the forward; the gradients of those; and the outputs of
  // the backward, the gradient of dt + bias, and what sums up to that of A.
  float *decays, *steps;
  const float *d_decays, *d_steps;
  float *d_dt, *d_a;
};

// Each computes rows [begin, end) of batch * length.
struct SsdStepsKernels {
  void (*forward)(const SsdStepsArgs& args, int64_t begin, int64_t end);
  void (*backward)(const SsdStepsArgs& args, int64_t begin, int64_t end);
};

MLX_ANVIL_DECLARE_KERNELS(PerDtype<SsdStepsKernels>, ssd_steps_kernels)

}  // namespace mlx_anvil

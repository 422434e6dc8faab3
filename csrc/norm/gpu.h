// The norms' Metal kernels: which one, how many threads, in what parts.
#pragma once

#include <string>

#include "norm/compose.h"

namespace mlx_anvil {

struct NormBackwardArrays {
  const mx::array* d_y;
  const mx::array* d_h;  // null where h was not a result of the call
  mx::array* d_x;
  mx::array* d_gate;    // null without a gate
  mx::array* d_weight;  // null where it is not wanted
  mx::array* d_bias;
};

// Whether there are kernels for rows of `x` on `stream`, the CPU's own included; if not, why.
bool can_launch_norm(const mx::array& x, const mx::Stream& stream, std::string* why_not);

void norm_forward_gpu(const NormConfig& config,
                      const NormView& in,
                      Arrays& outputs,
                      const mx::Stream& stream);

// `in.x` is h.
void norm_backward_gpu(const NormConfig& config,
                       const NormView& in,
                       const NormBackwardArrays& arrays,
                       const mx::Stream& stream);

}  // namespace mlx_anvil

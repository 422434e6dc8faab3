// Launches of the norms' Metal kernels: kernel, threads and parts. Called by the primitives.
#pragma once

#include <string>

#include "norm/compose.h"

namespace mlx_anvil {

struct NormBackwardArrays {
  const mx::array* d_y;
  const mx::array* d_h;  // null if h was not an output of the call
  mx::array* d_x;
  mx::array* d_gate;    // null if there is no gate
  mx::array* d_weight;  // null if not wanted
  mx::array* d_bias;
};

// Returns true if kernels can process rows of `x` on `stream`, CPU streams included. Otherwise sets
// the reason.
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

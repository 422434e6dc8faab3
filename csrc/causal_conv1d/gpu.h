// Launches of causal_conv1d's Metal kernels: kernel, threads and parts. Called by the primitives.
#pragma once

#include <string>

#include "causal_conv1d/compose.h"

namespace mlx_anvil {

// Null where a gradient is not wanted, or the call lacks the array.
struct ConvGradients {
  mx::array *d_x, *d_state, *d_weight, *d_bias;
};

// Returns true if kernels take `x` on `stream`, CPU streams included. Otherwise sets the reason.
bool can_launch_conv(const mx::array& x, const mx::Stream& stream, std::string* why_not);

void conv_forward_gpu(const ConvConfig& config,
                      const ConvView& in,
                      Arrays& outputs,
                      const mx::Stream& stream);

void conv_backward_gpu(const ConvConfig& config,
                       const ConvView& in,
                       const mx::array& d_y,
                       const mx::array& d_new_state,
                       const ConvGradients& to,
                       const mx::Stream& stream);

}  // namespace mlx_anvil

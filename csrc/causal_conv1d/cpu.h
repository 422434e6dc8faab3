// The CPU driver of causal_conv1d: threads, tiles, scratch memory and sums.
#pragma once

#include "causal_conv1d/problem.h"

namespace mlx_anvil {

void conv_forward_cpu(const ConvForwardArgs& args);
void conv_backward_cpu(const ConvBackwardArgs& args);

}  // namespace mlx_anvil

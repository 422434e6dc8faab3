// The definition in MLX ops.
#pragma once

#include "selective_scan/operands.h"

namespace mlx_anvil {

// Returns y and the last state. All steps are computed together, in log2(steps) rounds, each of
// which combines a step with those before it: a graph of as many nodes as there are steps would be
// slow to build and to differentiate.
Arrays compose_scan(const ScanConfig& config, const Arrays& inputs, mx::Stream s);

}  // namespace mlx_anvil

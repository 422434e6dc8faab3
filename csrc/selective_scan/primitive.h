// selective_scan as a graph node.
#pragma once

#include "selective_scan/operands.h"

namespace mlx_anvil {

// Returns y and the last state. Rows have one dtype, the other arrays are float32, and lengths are
// int32.
Arrays apply_scan(const ScanConfig& config, Arrays inputs, mx::Stream s);

}  // namespace mlx_anvil

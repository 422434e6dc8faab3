// What gated_delta and ssd_scan do with a call that has been checked.
#pragma once

#include "gated_delta/compose.h"

namespace mlx_anvil {

// Runs the steps in a kernel, or as a graph of MLX ops. The config's flags of arrays are set here.
// in.positions may be empty. `dtype`: of y.
GatedDeltaResult run_recurrence(GatedDeltaConfig config,
                                GatedDeltaInputs in,
                                mx::Dtype dtype,
                                mx::Stream s);

// Of the outputs of a node: y, the state, and the states if there are.
GatedDeltaResult result_of(const Arrays& outputs);

}  // namespace mlx_anvil

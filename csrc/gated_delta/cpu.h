// gated_delta on the CPU, called from the primitives' stream tasks.
#pragma once

#include <vector>

#include "gated_delta/problem.h"
#include "gated_delta/simd/kernels.h"

namespace mlx_anvil {

void gated_delta_cpu(const DeltaForwardArgs& args);
void gated_delta_backward_cpu(const DeltaBackwardArgs& args);

// For both drivers: the operands of a value head of a batch row.
DeltaHead head_of(const DeltaArgs& args, int64_t batch, int64_t value_head);

// The steps of a batch row that change its state.
int64_t steps_of(const DeltaArgs& args, int64_t batch);

// A state that is returned: where it is among those of its batch row, and its step. -1: none
// changes it.
struct DeltaPosition {
  int64_t index, step;
};

// In the order of their steps.
std::vector<DeltaPosition> positions_of(const DeltaArgs& args, int64_t batch);

}  // namespace mlx_anvil

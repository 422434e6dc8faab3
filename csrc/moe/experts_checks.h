#pragma once

#include "moe/experts.h"

namespace mlx_anvil {

// Throws unless the arrays fit each other and their formats.
void check_experts(const char* op,
                   const ExpertArrays& arrays,
                   const QuantizedFormat& gate_and_up,
                   const QuantizedFormat& down);

// The promoted dtype of x and of affine scales and biases.
mx::Dtype experts_dtype(const ExpertArrays& arrays);

}  // namespace mlx_anvil

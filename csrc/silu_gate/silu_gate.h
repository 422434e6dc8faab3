#pragma once

#include "common/elementwise.h"

namespace mlx_anvil {

// silu(gate) * up with silu(x) = x / (1 + e^-x), elementwise. Shapes broadcast, dtypes promote by
// MLX's rules; float32 arithmetic inside, rounded once to the result's dtype.
mx::array silu_gate(const mx::array& gate, const mx::array& up, mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

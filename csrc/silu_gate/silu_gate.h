// The op function silu_gate.
#pragma once

#include "common/elementwise.h"

namespace mlx_anvil {

inline constexpr const char* kSiluGate = "silu_gate";  // in messages

// silu(gate) * up with silu(x) = x / (1 + e^-x), elementwise. Shapes broadcast and dtypes promote
// by MLX's rules. The arithmetic is float32, rounded once to the result's dtype.
mx::array silu_gate(const mx::array& gate, const mx::array& up, mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

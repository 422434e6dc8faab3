// The op function sigmoid_gate.
#pragma once

#include "common/elementwise.h"

namespace mlx_anvil {

inline constexpr const char* kSigmoidGate = "sigmoid_gate";  // in messages

// x * sigmoid(gate) with sigmoid(g) = 1 / (1 + e^-g), elementwise: a gate of csrc/common/gate.h
// whose `up` is x. Shapes broadcast and dtypes promote by MLX's rules. The arithmetic is float32,
// rounded once to the result's dtype.
mx::array sigmoid_gate(const mx::array& x, const mx::array& gate, mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

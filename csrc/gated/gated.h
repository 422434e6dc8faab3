// The op function gated.
#pragma once

#include <optional>

#include "common/elementwise.h"

namespace mlx_anvil {

inline constexpr const char* kGated = "gated";  // in messages

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu2, kSwigluOai };

inline constexpr const char* kActivations[] = {"silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"};

inline constexpr float kDefaultOaiLimit = 7.0f;  // of GPT-OSS

// activation(gate) * up, elementwise. With a limit, min(gate, limit) and clip(up, -limit, limit)
// take the place of gate and up. kSwigluOai adds 1 to up, and always has a limit. Shapes broadcast
// and dtypes promote by MLX's rules. The arithmetic is float32, rounded once to the result's dtype.
mx::array gated(const mx::array& gate,
                const mx::array& up,
                Activation activation,
                std::optional<float> limit = {},
                mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

// The op function gated.
#pragma once

#include <optional>

#include "common/elementwise.h"
#include "common/gate_options.h"

namespace mlx_anvil {

inline constexpr const char* kGated = "gated";  // in messages

// By Activation.
inline constexpr const char* kActivations[] = {"silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"};

inline constexpr float kDefaultOaiLimit = 7.0f;  // of GPT-OSS

// Throws unless the limit is finite and above 0. kSwigluOai always has one.
GateOptions checked_gate(const char* op, Activation activation, std::optional<float> limit);

// activation(gate) * up, elementwise. With a limit, min(gate, limit) and clip(up, -limit, limit)
// take the place of gate and up. kSwigluOai adds 1 to up, and always has a limit. Shapes broadcast
// and dtypes promote by MLX's rules. The arithmetic is float32, rounded once to the result's dtype.
mx::array gated(const mx::array& gate,
                const mx::array& up,
                const GateOptions& options,
                mx::StreamOrDevice stream = {});

// The same in MLX ops, of arrays of one shape and dtype.
mx::array compose_gated(const mx::array& gate,
                        const mx::array& up,
                        const GateOptions& options,
                        mx::Stream s);

}  // namespace mlx_anvil

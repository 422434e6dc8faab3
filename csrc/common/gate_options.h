// The activation of a gate and its limit. Plain data, because kernel files include this header
// (isa.h says why they include no other kind).
#pragma once

#include <cstdint>

#include "metal/common/activation_kind.h"

namespace mlx_anvil {

enum class Activation : int32_t {
  kSilu = MLX_ANVIL_SILU,
  kGelu = MLX_ANVIL_GELU,
  kGeluTanh = MLX_ANVIL_GELU_TANH,
  kRelu2 = MLX_ANVIL_RELU2,
  kSwigluOai = MLX_ANVIL_SWIGLU_OAI,
};

struct GateOptions {
  Activation activation = Activation::kSilu;
  float limit = 0.0f;  // of min(gate, limit) and clip(up, -limit, limit); 0: none

  bool operator==(const GateOptions&) const = default;
};

}  // namespace mlx_anvil

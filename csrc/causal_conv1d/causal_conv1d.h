// The op function causal_conv1d. Formula: the docstring in python.cpp.
#pragma once

#include <optional>
#include <utility>

#include "common/primitive.h"

namespace mlx_anvil {

inline constexpr const char* kCausalConv1d = "causal_conv1d";  // in messages

struct CausalConvInputs {
  mx::array x;       // [batch, time, channels]
  mx::array weight;  // [channels, width]
  std::optional<mx::array> bias, state, lengths;
};

// Returns y and the new state.
std::pair<mx::array, mx::array> causal_conv1d(const CausalConvInputs& in,
                                              bool silu,
                                              mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

// The op function gated_delta.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

inline constexpr const char* kGatedDelta = "gated_delta";  // in messages

// Positions whose states are returned. A list is for every batch row.
using ReturnStates = std::variant<std::monostate, std::vector<int64_t>, mx::array>;

struct GatedDeltaOptions {
  std::optional<mx::array> state;
  ReturnStates return_states;
  std::optional<mx::array> lengths;
  std::optional<float> normalize_eps;
};

struct GatedDeltaResult {
  mx::array y, state;
  std::optional<mx::array> states;  // if wanted
};

GatedDeltaResult gated_delta(const mx::array& q,
                             const mx::array& k,
                             const mx::array& v,
                             const mx::array& g,
                             const mx::array& beta,
                             const GatedDeltaOptions& options,
                             mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

// The op function ssd_scan.
#pragma once

#include <optional>
#include <utility>

#include "gated_delta/gated_delta.h"

namespace mlx_anvil {

inline constexpr const char* kSsdScan = "ssd_scan";  // in messages

struct SsdOptions {
  std::optional<mx::array> d, z, state, dt_bias, lengths;
  bool softplus = false;
  std::optional<std::pair<float, float>> limit;  // of dt
  ReturnStates return_states;
};

// The recurrence of Mamba-2: that of gated_delta without its correction (gated_delta/problem.h).
// x and z are [batch, length, heads, dim], dt [batch, length, heads], A, D and dt_bias [heads], B
// and C [batch, length, groups, states], and state [batch, heads, dim, states].
GatedDeltaResult ssd_scan(const mx::array& x,
                          const mx::array& dt,
                          const mx::array& a,
                          const mx::array& b,
                          const mx::array& c,
                          const SsdOptions& options,
                          mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

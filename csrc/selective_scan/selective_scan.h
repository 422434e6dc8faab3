// The op function selective_scan.
#pragma once

#include <optional>
#include <utility>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

inline constexpr const char* kSelectiveScan = "selective_scan";  // in messages

struct ScanOptions {
  std::optional<mx::array> d, z, state, lengths;
  bool softplus = false;
};

// The recurrence of Mamba-1 (problem.h). x, dt and z are [batch, steps, channels], A [channels,
// states], B and C [batch, steps, states], D [channels], state [batch, channels, states] and
// lengths [batch]. Returns y, in the promoted dtype of the rows, and the last state in float32.
std::pair<mx::array, mx::array> selective_scan(const mx::array& x,
                                               const mx::array& dt,
                                               const mx::array& a,
                                               const mx::array& b,
                                               const mx::array& c,
                                               const ScanOptions& options,
                                               mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

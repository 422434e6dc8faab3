// Checks of gated_delta's arguments (see common/checks.h).
#pragma once

#include "gated_delta/gated_delta.h"

namespace mlx_anvil {

void check_gated_delta(const mx::array& q,
                       const mx::array& k,
                       const mx::array& v,
                       const mx::array& g,
                       const mx::array& beta,
                       const GatedDeltaOptions& options);

// int32 [batch]
mx::array checked_lengths(const mx::array& lengths, const mx::array& q, mx::Stream s);

// int32 [batch or 1, positions]
mx::array checked_positions(const GatedDeltaOptions& options, const mx::array& q, mx::Stream s);

}  // namespace mlx_anvil

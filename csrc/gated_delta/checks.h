// Checks of gated_delta's arguments (see common/checks.h).
#pragma once

#include "common/checks.h"
#include "gated_delta/gated_delta.h"

namespace mlx_anvil {

void check_gated_delta(const mx::array& q,
                       const mx::array& k,
                       const mx::array& v,
                       const mx::array& g,
                       const mx::array& beta,
                       const GatedDeltaOptions& options);

// Of gated_delta and ssd_scan. `sequence`: an array [batch, length, ...].
// int32 [batch]
mx::array checked_lengths(const char* op,
                          const mx::array& lengths,
                          const NamedArray& sequence,
                          mx::Stream s);

// int32 [batch or 1, positions]. Empty: no states are to be returned.
std::optional<mx::array> checked_positions(const char* op,
                                           const ReturnStates& return_states,
                                           const NamedArray& sequence,
                                           mx::Stream s);

}  // namespace mlx_anvil

// Checks of the arguments that rope, rope_qk and rope_and_cache share.
#pragma once

#include <string>

#include "rope/primitive.h"
#include "rope/rope.h"

namespace mlx_anvil {

// Checks what does not depend on shapes.
void check_options(const char* op, const RopeOptions& options);

// The offset as an int32 or int64 array with one position, or with one per batch row, and the
// frequencies in float32.
RopePositions checked_positions(const char* op,
                                const RopeOptions& options,
                                int batch,
                                mx::Stream s);

// The frequencies in float32, if they are given.
std::optional<mx::array> checked_freqs(const char* op, const RopeOptions& options, mx::Stream s);

RopeConfig config_of(const RopeOptions& options);

}  // namespace mlx_anvil

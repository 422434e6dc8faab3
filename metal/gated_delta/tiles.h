// Tile sizes of gated_delta's kernels. Instantiations (MSL) and dispatch (C++) read this list. A
// call runs in the first tile that holds its key dim.
//
// Some lanes of a simdgroup own a row of the state: its numbers stay in their registers for all
// steps, 16 or 32 per lane forward. The backward holds three rows at a time, so that more lanes
// share them.
#pragma once

// X(key_dim, lanes, backward_lanes, backward_simdgroups)
#define MLX_ANVIL_DELTA_TILES(X) \
  X(64, 4, 4, 8)                 \
  X(128, 4, 8, 8)                \
  X(256, 8, 16, 4)

enum { kDeltaSimdgroups = 4, kDeltaSumSimdgroups = 4 };

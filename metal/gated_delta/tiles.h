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
enum { kDeltaPartNumbers = 4 };  // after the vectors of a part (parts.h); the last keeps it aligned

// Kernels by chunks of steps (chunk.h). X(variant, dtype, T, pairs, key_dim)
#define MLX_ANVIL_DELTA_CHUNKS(X, dim) \
  X("", float32, float, false, dim)    \
  X("", float16, half, false, dim)     \
  X("", bfloat16, bfloat, false, dim)

#ifdef __MSLC__  // Apple's GPUs have matrix units for float32
#define MLX_ANVIL_DELTA_CHUNK_KERNELS(X)  \
  MLX_ANVIL_DELTA_CHUNKS(X, 64)           \
  MLX_ANVIL_DELTA_CHUNKS(X, 128)          \
  X("pairs_", bfloat16, bfloat, true, 64) \
  X("pairs_", bfloat16, bfloat, true, 128)
#else
#define MLX_ANVIL_DELTA_CHUNK_KERNELS(X) \
  MLX_ANVIL_DELTA_CHUNKS(X, 64)          \
  MLX_ANVIL_DELTA_CHUNKS(X, 128)
#endif

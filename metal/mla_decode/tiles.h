// Tile sizes of mla_decode's kernels. Instantiations (MSL) and dispatch (C++) read this list. A
// call runs in the first tile that holds its rank, and the kernel pads to it.
//
// A simdgroup has rank / simdgroups columns of the latent, and of the output of 16 rows: 64 columns
// are 32 registers of a thread. With 8 columns of the rope part, its columns of q and of two blocks
// of keys take 18 each, if those are 16 rows of 16 bits or 8 of 32 bits (q: 36). Apple's GPUs give
// a thread 128 registers.
#pragma once

// Query rows of a threadgroup, and the largest rope dim.
enum { kMlaRows = 16, kMlaRopeDim = 64 };

// X(dtype, type, rank, keys, simdgroups)
#define MLX_ANVIL_MLA_TILES_OF(X, dtype, type, keys) \
  X(dtype, type, 256, keys, 8)                       \
  X(dtype, type, 512, keys, 8)

#define MLX_ANVIL_MLA_TILES(X)                 \
  MLX_ANVIL_MLA_TILES_OF(X, float32, float, 8) \
  MLX_ANVIL_MLA_TILES_OF(X, float16, half, 16) \
  MLX_ANVIL_MLA_TILES_OF(X, bfloat16, bfloat, 16)

// For matrix units that multiply for four SIMD groups at once: rows of queries, and of a tile of
// keys. Threadgroup memory, which the launch sets, holds three such tiles and the weights: 224 KB.
enum { kMlaGroupRows = 64 };

// X(dtype, type, rank)
#define MLX_ANVIL_MLA_GROUP_TILES(X) \
  X(float16, half, 512)              \
  X(bfloat16, bfloat, 512)

// Threadgroup memory of gated_delta's kernels by chunks, in bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gated_delta/problem.h"
#include "metal/gated_delta/chunk_sizes.h"

namespace mlx_anvil {

// Floats of a chunk in `rows` (metal/gated_delta/channels.h).
inline int64_t chunk_facts(const DeltaSizes& sizes) {
  return kChunkRows * kChunk + (sizes.is_per_channel ? sizes.key_dim : 0);
}

// What multiplies: float32 numbers, or pairs of bfloat16 (metal/gated_delta/chunk.h), by one SIMD
// group or by four.
enum class Products { kFloats, kPairs, kGroups };

// The kernels that walk along a sequence.
enum class Walk { kForward, kKeepsStates, kBackward };

// Bytes of threadgroup memory of a walk (metal/gated_delta/chunk_walk.h and chunk_walk_ahead.h).
// Rows of tiles are 16 bytes longer than their columns, but for groups.
inline int64_t walk_memory(const DeltaSizes& sizes, Products products, Walk walk) {
  const int64_t facts = 4 * chunk_facts(sizes), panels = sizes.key_dim / kPanel;
  if (products == Products::kFloats) {
    return facts + kChunk * (4 * kChunk + 16);
  }
  const int64_t tile = kChunk * (2 * kChunk + (products == Products::kGroups ? 0 : 16));
  const int64_t keys = !sizes.is_per_channel     ? panels
                       : walk == Walk::kBackward ? 2 * panels
                                                 : 4 * panels;
  const int64_t others = 3;                                             // values and the inverse
  const int64_t queries = walk == Walk::kKeepsStates ? 0 : panels + 1;  // and weights
  return 2 * facts + tile * (sizes.is_per_channel ? 1 : 2) * (keys + others + queries);
}

// Bytes of a square of float32 in threadgroup memory, and of a tile of 16 bits.
inline constexpr uint32_t kSquareMemory = 4 * kChunk * (kChunk + 4);
inline constexpr uint32_t kTileMemory = kChunk * (2 * kPanel + 16);
// Those of chunk_backward_squares with pairs.
inline constexpr uint32_t kTilesOfPairs = 2 * kValueTiles * kTileMemory;

// Those of chunk_backward_keys_group, without padding.
inline constexpr uint32_t kTilesOfKeys = (2 * kStageTiles + kTilesOfQAndK) * kChunk * kPanel * 2;

// Those of chunk_prepare: a square, or with pairs the tiles of q and k if they are larger.
inline uint32_t prepare_memory(const DeltaSizes& sizes, bool are_pairs) {
  const uint32_t tiles = 2 * static_cast<uint32_t>(sizes.key_dim / kPanel) * kTileMemory;
  return are_pairs ? std::max(kSquareMemory, tiles) : kSquareMemory;
}

}  // namespace mlx_anvil

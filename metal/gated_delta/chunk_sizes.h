// Sizes of gated_delta's kernels by chunks, and what their arrays between launches hold. Kernels
// (MSL) and host (C++) read this list.
#pragma once

#ifndef __METAL__
namespace mlx_anvil {
#endif

enum {
  kChunk = 64,        // steps
  kPanel = 64,        // columns of a tile
  kChunkValues = 64,  // rows of the state of a threadgroup
  kChunkThreads = 128,
  kBlock = 16,     // steps of a block (channels.h)
  kChannels = 32,  // of a threadgroup's panel, there
};

// What the kernels know of each step of a chunk.
enum ChunkRow {
  kRate,         // beta
  kGate,         // g
  kDecayBefore,  // gamma: from the chunk's first state to the step
  kDecayAfter,   // from the step to the chunk's last state
  kKeyScale,     // of k, if it is normalised; else 1
  kQueryScale,   // likewise of q, with q_scale
  kSkip,         // if there is one; else 0
  kChunkRows
};

// Per channel, the decays are in the keys and queries instead: scaled from the chunk's first state
// to the step, or from the step to the chunk's last state.
enum ChunkOperand { kQueriesFrom, kKeysFrom, kKeysTo, kChunkOperands };

// Squares of the gradients of a chunk's pairs of steps, as left operands of products with its q and
// k, whose scales are in them: of d_q with k, of d_k with k, and of d_k with q. Per channel, the
// gradients of P and A alone.
enum ChunkSquare { kQueriesByKeys, kKeysByKeys, kKeysByQueries, kChunkSquares };

// Tiles that are copied ahead, of a panel of 64 columns of v in one of two places: for
// chunk_backward_squares.metal, and for chunk_backward_keys_group.metal, which also has two of
// keys, those of q and k.
enum ValueTile { kTileOfV, kTileOfDY, kTileOfU, kTileOfDX, kValueTiles };
enum KeyTile { kOfDY, kOfDX, kOfU, kOfS, kOfDS, kStageTiles, kTilesOfQAndK = 2 };

// Sums over the pairs of steps of a chunk, for each step.
enum ChunkSum { kGateSum, kRateSum, kSkipSum, kChunkSums };

// Dot products of gradients with a step's q or k, for each panel of columns: W . q, Z . k and N .
// k. The last has parts of the sum over S d_S instead.
enum ChunkDot { kQueryDot, kKeyDot, kEndDot, kThroughDot, kChunkDots };

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

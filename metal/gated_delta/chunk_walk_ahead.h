// Walks whose tiles are copied ahead of their use (chunk_walk.h), for matrix units of 16 bits. Rows
// are vectors of 16 bytes.
#pragma once

#include "metal/gated_delta/chunk_walk.h"

// Tiles of 64 rows in threadgroup memory, and copies to them.
template <typename T>
struct TilesAhead {
  enum { kTile = kChunk * TileRow<T, kChunk>::kStride };  // elements

  threadgroup float* memory;
  uint thread_index;

  METAL_FUNC threadgroup T* tile(int first_float, int i) const thread {
    return reinterpret_cast<threadgroup T*>(memory + first_float) + i * kTile;
  }
  METAL_FUNC void copy_rows(int first_float, int i, Rows<T> from) const thread {
    TileShare<T, kChunk, kPanel, kChunkThreads>::start_copies(tile(first_float, i), from,
                                                              thread_index);
  }
  METAL_FUNC void copy_facts(int first_float, const device float* from, int count) const thread {
    for (int at = 4 * int(thread_index); at < count; at += 4 * kChunkThreads) {
      start_copy(reinterpret_cast<threadgroup uint4*>(memory + first_float + at),
                 reinterpret_cast<const device uint4*>(from + at));
    }
  }
};

// All tiles of a chunk arrive while the chunk before is computed.
template <typename T, bool kBackward, int kKeyDim>
struct ChunkWalk<T, true, false, kBackward, kKeyDim> {
  using Source = ChunkSource<T, true, false, kKeyDim>;
  using Tiles = TilesAhead<T>;
  enum { kOfPairs = true, kKeyPlanes = 1, kPanels = kKeyDim / kPanel };
  enum { kWeightPlanes = kBackward ? 2 : 1 };
  enum { kQueries = kPanels, kValues = 2 * kPanels, kInverse, kWeights = kInverse + 2 };
  enum { kTiles = kWeights + kWeightPlanes };
  enum { kPlace = Source::kFacts + kTiles * Tiles::kTile / 2 };  // floats

  Source source;
  threadgroup float* memory;
  uint thread_index;
  ChunkPlace chunk;
  int turn;

  METAL_FUNC void start(ChunkPlace first, bool exists, bool all) thread {
    turn = 1;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    copy(0, first, exists, all);
  }
  METAL_FUNC void begin(ChunkPlace own, ChunkPlace next, bool has_next, bool all) thread {
    chunk = own;
    turn ^= 1;
    wait_for_copies<0>();
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    copy(turn ^ 1, next, has_next, all);
  }
  template <int kTurn>
  METAL_FUNC void arrive() thread {}

  template <ChunkOperand kOperand>
  METAL_FUNC const threadgroup T* keys(int panel, int) const thread {
    return tile((kOperand == kQueriesFrom ? int(kQueries) : 0) + panel);
  }
  METAL_FUNC const threadgroup T* values() const thread { return tile(kValues); }
  METAL_FUNC const threadgroup T* inverse(int plane) const thread { return tile(kInverse + plane); }
  METAL_FUNC const threadgroup T* weights(int plane) const thread { return tile(kWeights + plane); }
  METAL_FUNC const threadgroup float* facts(ChunkRow row) const thread {
    return memory + turn * kPlace + row * kChunk;
  }
  METAL_FUNC const threadgroup float* decays() const thread { return memory; }  // there are none

 private:
  METAL_FUNC Tiles tiles() const thread { return {memory, thread_index}; }
  METAL_FUNC const threadgroup T* tile(int i) const thread {
    return tiles().tile(turn * kPlace + Source::kFacts, i);
  }
  METAL_FUNC void copy(int place, ChunkPlace own, bool exists, bool all) const thread {
    const int facts = place * kPlace, first = facts + Source::kFacts;
    if (exists) {
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        tiles().copy_rows(first, panel, source.keys(own, kKeysFrom, panel, 0));
        if (all) {
          tiles().copy_rows(first, kQueries + panel, source.keys(own, kQueriesFrom, panel, 0));
        }
      }
      tiles().copy_rows(first, kValues, chunk_rows(source.values, own, 0));
      MLX_ANVIL_UNROLL
      for (int plane = 0; plane < 2; ++plane) {
        if (corrects) {
          tiles().copy_rows(first, kInverse + plane, Source::square(source.inverse, own, plane));
        }
        if (all && plane < kWeightPlanes) {
          tiles().copy_rows(first, kWeights + plane, Source::square(source.weights, own, plane));
        }
      }
      tiles().copy_facts(facts, source.facts(own), Source::kFacts);
    }
    end_copies();
  }
};

// With a decay per channel two chunks do not fit into threadgroup memory. The tiles of a turn
// arrive in the place of the same turn of the chunk before, while the other turns are computed.
template <typename T, bool kBackward, int kKeyDim>
struct ChunkWalk<T, true, true, kBackward, kKeyDim> {
  using Source = ChunkSource<T, true, true, kKeyDim>;
  using Tiles = TilesAhead<T>;
  enum { kOfPairs = true, kKeyPlanes = 2, kPanels = kKeyDim / kPanel, kTurns = 4 };
  enum { kQueryPlanes = kBackward ? 2 : 1, kWeightPlanes = kQueryPlanes };
  enum { kFrom = 0, kTo = 2 * kPanels, kQueries = 4 * kPanels };  // places of tiles
  enum { kValues = kQueries + kQueryPlanes * kPanels, kInverse, kWeights = kInverse + 2 };

  Source source;
  threadgroup float* memory;
  uint thread_index;
  ChunkPlace chunk, next;
  bool has_next, needs_all;
  int turn;  // of the two places of facts

  METAL_FUNC void start(ChunkPlace first, bool exists, bool all) thread {
    turn = 1;
    next = first;
    has_next = exists;
    needs_all = all;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    copy<0>(next, exists);
    copy<1>(next, exists);
    copy<2>(next, exists);
  }
  METAL_FUNC void begin(ChunkPlace own, ChunkPlace after, bool has_after, bool) thread {
    chunk = own;
    turn ^= 1;
    arrive<0>();
    next = after;
    has_next = has_after;
  }
  // The last two groups of copies are those of the next two turns.
  template <int kTurn>
  METAL_FUNC void arrive() thread {
    wait_for_copies<kTurns - 2>();
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // all are done with the turn before
    copy<(kTurn + kTurns - 1) % kTurns>(next, has_next);
  }

  template <ChunkOperand kOperand>
  METAL_FUNC const threadgroup T* keys(int panel, int plane) const thread {
    const int first = kOperand == kQueriesFrom ? int(kQueries)
                      : kOperand == kKeysFrom  ? int(kFrom)
                                               : int(kTo);
    return tile(first + plane * kPanels + panel);
  }
  METAL_FUNC const threadgroup T* values() const thread { return tile(kValues); }
  METAL_FUNC const threadgroup T* inverse(int plane) const thread { return tile(kInverse + plane); }
  METAL_FUNC const threadgroup T* weights(int plane) const thread { return tile(kWeights + plane); }
  METAL_FUNC const threadgroup float* facts(ChunkRow row) const thread {
    return memory + turn * Source::kFacts + row * kChunk;
  }
  METAL_FUNC const threadgroup float* decays() const thread {
    return memory + turn * Source::kFacts + kChunkRows * kChunk;
  }

 private:
  METAL_FUNC Tiles tiles() const thread { return {memory, thread_index}; }
  METAL_FUNC const threadgroup T* tile(int i) const thread {
    return tiles().tile(2 * Source::kFacts, i);
  }
  METAL_FUNC void copy_keys(ChunkPlace own,
                            ChunkOperand operand,
                            int place,
                            int planes) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < planes * kPanels; ++i) {
      tiles().copy_rows(2 * Source::kFacts, place + i,
                        source.keys(own, operand, i % kPanels, i / kPanels));
    }
  }
  METAL_FUNC void copy_square(const device T* from,
                              ChunkPlace own,
                              int place,
                              int planes) const thread {
    MLX_ANVIL_UNROLL
    for (int plane = 0; plane < planes; ++plane) {
      tiles().copy_rows(2 * Source::kFacts, place + plane, Source::square(from, own, plane));
    }
  }
  // Copies the tiles of a turn.
  template <int kTurn>
  METAL_FUNC void copy(ChunkPlace own, bool exists) const thread {
    enum { kFirst = kTurn == 0, kSecond = kTurn == 1, kThird = kTurn == 2, kLast = kTurn == 3 };
    if (exists) {
      if (kFirst) {
        tiles().copy_facts((turn ^ 1) * Source::kFacts, source.facts(own), Source::kFacts);
      }
      if (kBackward ? kLast : kFirst) {
        copy_keys(own, kKeysFrom, kFrom, 2);
      }
      if (kBackward ? kFirst : kLast) {
        copy_keys(own, kKeysTo, kTo, 2);
      }
      if (kSecond) {
        tiles().copy_rows(2 * Source::kFacts, kValues, chunk_rows(source.values, own, 0));
        copy_square(source.inverse, own, kInverse, 2);
      }
      if (kThird && needs_all) {
        copy_keys(own, kQueriesFrom, kQueries, kQueryPlanes);
      }
      if ((kBackward ? kSecond : kThird) && needs_all) {
        copy_square(source.weights, own, kWeights, kWeightPlanes);
      }
    }
    end_copies();
  }
};

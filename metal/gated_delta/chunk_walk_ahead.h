// Walks whose tiles are copied ahead of their use (chunk_walk.h), for matrix units of 16 bits. Rows
// are vectors of 16 bytes.
#pragma once

#include "metal/gated_delta/chunk_walk.h"

// Tiles of 64 rows in threadgroup memory, and copies to them. The numbers of two chunks' steps come
// after the tiles, which begin at multiples of 1024 bytes where products want that.
template <typename T, bool kGroups, int kFacts>
struct TilesAhead {
  using Swizzled = SwizzledTile<T, kChunk, kPanel>;
  enum { kTile = kGroups ? int(Swizzled::kSize) : kChunk * TileRow<T, kChunk>::kStride };
  using Tile = metal::conditional_t<kGroups, GroupTile<T>, const threadgroup T*>;

  threadgroup float* memory;
  int count;  // of tiles
  uint thread_index;

  METAL_FUNC Tile tile(int i) const thread { return Tile{place_of(i)}; }
  METAL_FUNC threadgroup float* facts(int turn) const thread {
    return memory + count * kTile / 2 + turn * kFacts;
  }
  METAL_FUNC void copy_rows(int i, Rows<T> from) const thread {
    if (kGroups) {
      Swizzled::template start_copies<kChunkThreads>(place_of(i), from, thread_index);
    } else {
      TileShare<T, kChunk, kPanel, kChunkThreads>::start_copies(place_of(i), from, thread_index);
    }
  }
  METAL_FUNC void copy_facts(int turn, const device float* from) const thread {
    for (int at = 4 * int(thread_index); at < kFacts; at += 4 * kChunkThreads) {
      start_copy(reinterpret_cast<threadgroup uint4*>(facts(turn) + at),
                 reinterpret_cast<const device uint4*>(from + at));
    }
  }
  // Waits until at most the last kPending groups of copies are in flight.
  template <int kPending>
  METAL_FUNC static void wait() {
    if (kGroups) {
      wait_for_tiles<kPending>();
    } else {
      wait_for_copies<kPending>();
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

 private:
  METAL_FUNC threadgroup T* place_of(int i) const thread {
    return reinterpret_cast<threadgroup T*>(memory) + i * kTile;
  }
};

// All tiles of a chunk arrive while the chunk before is computed. What not all walks need comes
// last.
template <typename T, bool kGroups, bool kBackward, int kKeyDim>
struct ChunkWalk<T, true, false, kGroups, kBackward, kKeyDim> {
  using Source = ChunkSource<T, true, false, kKeyDim>;
  using Tiles = TilesAhead<T, kGroups, Source::kFacts>;
  using Tile = typename Tiles::Tile;
  enum { kOfPairs = true, kKeyPlanes = 1, kPanels = kKeyDim / kPanel };
  enum { kValues = kPanels, kInverse, kQueries = kInverse + 2 };  // places of tiles
  enum { kWeights = kQueries + kPanels, kCount };

  Source source;
  threadgroup float* memory;
  uint thread_index;
  ChunkPlace chunk;
  int turn;
  bool needs_all;

  METAL_FUNC void start(ChunkPlace first, bool exists, bool all) thread {
    turn = 1;
    needs_all = all;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    copy(0, first, exists);
  }
  METAL_FUNC void begin(ChunkPlace own, ChunkPlace next, bool has_next) thread {
    chunk = own;
    turn ^= 1;
    Tiles::template wait<0>();
    copy(turn ^ 1, next, has_next);
  }
  template <int kTurn>
  METAL_FUNC void arrive() thread {}

  template <ChunkOperand kOperand>
  METAL_FUNC Tile keys(int panel, int) const thread {
    return tile((kOperand == kQueriesFrom ? int(kQueries) : 0) + panel);
  }
  METAL_FUNC Tile values() const thread { return tile(kValues); }
  METAL_FUNC Tile inverse(int plane) const thread { return tile(kInverse + plane); }
  METAL_FUNC Tile weights() const thread { return tile(kWeights); }
  METAL_FUNC const threadgroup float* facts(ChunkRow row) const thread {
    return tiles().facts(turn) + row * kChunk;
  }
  METAL_FUNC const threadgroup float* decays() const thread { return memory; }  // there are none

 private:
  METAL_FUNC int count() const thread { return needs_all ? int(kCount) : int(kQueries); }
  METAL_FUNC Tiles tiles() const thread { return {memory, 2 * count(), thread_index}; }
  METAL_FUNC Tile tile(int i) const thread { return tiles().tile(turn * count() + i); }
  METAL_FUNC void copy(int place, ChunkPlace own, bool exists) const thread {
    const int first = place * count();
    if (exists) {
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        tiles().copy_rows(first + panel, source.keys(own, kKeysFrom, panel, 0));
        if (needs_all) {
          tiles().copy_rows(first + kQueries + panel, source.keys(own, kQueriesFrom, panel, 0));
        }
      }
      tiles().copy_rows(first + kValues, chunk_rows(source.values, own, 0));
      MLX_ANVIL_UNROLL
      for (int plane = 0; plane < 2 && corrects; ++plane) {
        tiles().copy_rows(first + kInverse + plane, source.inverse_plane(own, plane));
      }
      if (needs_all) {
        tiles().copy_rows(first + kWeights, source.weights_of(own));
      }
      tiles().copy_facts(place, source.facts(own));
    }
    end_copies();
  }
};

// With a decay per channel two chunks do not fit into threadgroup memory. The tiles of a turn
// arrive in the place of the same turn of the chunk before, while the other turns are computed.
template <typename T, bool kGroups, bool kBackward, int kKeyDim>
struct ChunkWalk<T, true, true, kGroups, kBackward, kKeyDim> {
  using Source = ChunkSource<T, true, true, kKeyDim>;
  using Tiles = TilesAhead<T, kGroups, Source::kFacts>;
  using Tile = typename Tiles::Tile;
  enum { kOfPairs = true, kPanels = kKeyDim / kPanel, kTurns = 4 };
  enum { kKeyPlanes = kBackward ? 1 : 2 };
  enum { kFrom = 0, kTo = kKeyPlanes * kPanels, kValues = 2 * kTo };  // places of tiles
  enum { kInverse = kValues + 1, kQueries = kInverse + 2 };
  enum { kWeights = kQueries + kPanels, kCount };

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
  METAL_FUNC void begin(ChunkPlace own, ChunkPlace after, bool has_after) thread {
    chunk = own;
    turn ^= 1;
    arrive<0>();
    next = after;
    has_next = has_after;
  }
  // The last two groups of copies are those of the next two turns. After the wait all threads are
  // done with the turn before.
  template <int kTurn>
  METAL_FUNC void arrive() thread {
    Tiles::template wait<kTurns - 2>();
    copy<(kTurn + kTurns - 1) % kTurns>(next, has_next);
  }

  template <ChunkOperand kOperand>
  METAL_FUNC Tile keys(int panel, int plane) const thread {
    const int first = kOperand == kQueriesFrom ? int(kQueries)
                      : kOperand == kKeysFrom  ? int(kFrom)
                                               : int(kTo);
    return tiles().tile(first + plane * kPanels + panel);
  }
  METAL_FUNC Tile values() const thread { return tiles().tile(kValues); }
  METAL_FUNC Tile inverse(int plane) const thread { return tiles().tile(kInverse + plane); }
  METAL_FUNC Tile weights() const thread { return tiles().tile(kWeights); }
  METAL_FUNC const threadgroup float* facts(ChunkRow row) const thread {
    return tiles().facts(turn) + row * kChunk;
  }
  METAL_FUNC const threadgroup float* decays() const thread {
    return tiles().facts(turn) + kChunkRows * kChunk;
  }

 private:
  METAL_FUNC Tiles tiles() const thread {
    return {memory, needs_all ? int(kCount) : int(kQueries), thread_index};
  }
  METAL_FUNC void copy_keys(ChunkPlace own,
                            ChunkOperand operand,
                            int place,
                            int planes) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < planes * kPanels; ++i) {
      tiles().copy_rows(place + i, source.keys(own, operand, i % kPanels, i / kPanels));
    }
  }
  // Copies the tiles of a turn.
  template <int kTurn>
  METAL_FUNC void copy(ChunkPlace own, bool exists) const thread {
    enum { kFirst = kTurn == 0, kSecond = kTurn == 1, kThird = kTurn == 2, kLast = kTurn == 3 };
    if (exists) {
      if (kFirst) {
        tiles().copy_facts(turn ^ 1, source.facts(own));
      }
      if (kBackward ? kLast : kFirst) {
        copy_keys(own, kKeysFrom, kFrom, kKeyPlanes);
      }
      if (kBackward ? kFirst : kLast) {
        copy_keys(own, kKeysTo, kTo, kKeyPlanes);
      }
      if (kSecond) {
        tiles().copy_rows(kValues, chunk_rows(source.values, own, 0));
        MLX_ANVIL_UNROLL
        for (int plane = 0; plane < 2; ++plane) {
          tiles().copy_rows(kInverse + plane, source.inverse_plane(own, plane));
        }
      }
      if (kThird && needs_all) {
        copy_keys(own, kQueriesFrom, kQueries, 1);
      }
      if ((kBackward ? kSecond : kThird) && needs_all) {
        tiles().copy_rows(kWeights, source.weights_of(own));
      }
    }
    end_copies();
  }
};

// The operands of one chunk after another, for the kernels that walk along a sequence.
#pragma once

#include "metal/gated_delta/chunk_tiles.h"

// Where the operands of a head are. `values` are the columns of v, or of the gradient of y, of the
// threadgroup.
template <typename T, bool kPairs>
struct ChunkSource {
  using Weight = typename ChunkNumbers<T, kPairs>::Weight;
  enum { kSquares = ChunkNumbers<T, kPairs>::kPlanes * kChunk * kChunk };

  Rows<T> q, k, values;  // of the whole head
  const device Weight *inverse, *weights;
  const device float* rows;

  METAL_FUNC const device float* facts(ChunkPlace chunk) const thread {
    return rows + chunk.index * kChunkRows * kChunk;
  }
  METAL_FUNC static Rows<Weight> square(const device Weight* from, ChunkPlace chunk, int plane) {
    return {from + chunk.index * kSquares + plane * kChunk * kChunk, kChunk, 1, kChunk, kChunk};
  }
};

// Tiles are loaded when they are needed, in the place of the one before. kWeightPlanes: parts of
// the weights that are read.
template <typename T, bool kPairs, int kPanels, int kWeightPlanes>
struct ChunkWalk {
  using Source = ChunkSource<T, kPairs>;
  using Weight = typename Source::Weight;
  enum { kFacts = kChunkRows * kChunk };  // floats, before the tile

  Source source;
  threadgroup float* memory;
  uint thread_index;
  ChunkPlace chunk;

  // Every thread calls these together. `next` is the chunk that comes after, if there is one;
  // `all`: q and the weights are needed.
  METAL_FUNC void start(ChunkPlace first, bool exists, bool all) thread {}
  METAL_FUNC void begin(ChunkPlace own, ChunkPlace next, bool has_next, bool all) thread {
    chunk = own;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = int(thread_index); i < kFacts; i += kChunkThreads) {
      memory[i] = source.facts(chunk)[i];
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  METAL_FUNC const threadgroup T* keys(int panel) const thread {
    return load<T>(chunk_rows(source.k, chunk, panel), keys_are_vectors);
  }
  METAL_FUNC const threadgroup T* queries(int panel) const thread {
    return load<T>(chunk_rows(source.q, chunk, panel), keys_are_vectors);
  }
  METAL_FUNC const threadgroup T* values() const thread {
    return load<T>(chunk_rows(source.values, chunk, 0), values_are_vectors);
  }
  METAL_FUNC const threadgroup Weight* inverse(int plane) const thread {
    return load<Weight>(Source::square(source.inverse, chunk, plane), true);
  }
  METAL_FUNC const threadgroup Weight* weights(int plane) const thread {
    return load<Weight>(Source::square(source.weights, chunk, plane), true);
  }
  METAL_FUNC const threadgroup float* facts(ChunkRow row) const thread {
    return memory + row * kChunk;
  }

 private:
  template <typename U>
  METAL_FUNC const threadgroup U* load(Rows<U> from, bool vectors) const thread {
    return load_tile<U>(memory + kFacts, from, vectors, thread_index);
  }
};

// All tiles of a chunk arrive while the chunk before is computed. Rows are vectors.
template <typename T, int kPanels, int kWeightPlanes>
struct ChunkWalk<T, true, kPanels, kWeightPlanes> {
  using Source = ChunkSource<T, true>;
  enum { kFacts = kChunkRows * kChunk, kTile = kChunk * TileRow<T, kChunk>::kStride };
  enum { kQueries = kPanels, kValues = 2 * kPanels, kInverse, kWeights = kInverse + 2 };
  enum { kTiles = kWeights + kWeightPlanes, kTurn = kFacts + kTiles * kTile / 2 };  // floats

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

  METAL_FUNC const threadgroup T* keys(int panel) const thread { return tile(turn, panel); }
  METAL_FUNC const threadgroup T* queries(int panel) const thread {
    return tile(turn, kQueries + panel);
  }
  METAL_FUNC const threadgroup T* values() const thread { return tile(turn, kValues); }
  METAL_FUNC const threadgroup T* inverse(int plane) const thread {
    return tile(turn, kInverse + plane);
  }
  METAL_FUNC const threadgroup T* weights(int plane) const thread {
    return tile(turn, kWeights + plane);
  }
  METAL_FUNC const threadgroup float* facts(ChunkRow row) const thread {
    return memory + turn * kTurn + row * kChunk;
  }

 private:
  METAL_FUNC threadgroup T* tile(int place, int i) const thread {
    return reinterpret_cast<threadgroup T*>(memory + place * kTurn + kFacts) + i * kTile;
  }
  METAL_FUNC void copy_rows(int place, int i, Rows<T> from) const thread {
    TileShare<T, kChunk, kPanel, kChunkThreads>::start_copies(tile(place, i), from, thread_index);
  }
  METAL_FUNC void copy(int place, ChunkPlace own, bool exists, bool all) const thread {
    if (exists) {
      MLX_ANVIL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_rows(place, panel, chunk_rows(source.k, own, panel));
        if (all) {
          copy_rows(place, kQueries + panel, chunk_rows(source.q, own, panel));
        }
      }
      copy_rows(place, kValues, chunk_rows(source.values, own, 0));
      MLX_ANVIL_UNROLL
      for (int plane = 0; plane < 2; ++plane) {
        if (corrects) {
          copy_rows(place, kInverse + plane, Source::square(source.inverse, own, plane));
        }
        if (all && plane < kWeightPlanes) {
          copy_rows(place, kWeights + plane, Source::square(source.weights, own, plane));
        }
      }
      if (thread_index < kFacts / 4) {
        const int at = 4 * int(thread_index);
        start_copy(reinterpret_cast<threadgroup uint4*>(memory + place * kTurn + at),
                   reinterpret_cast<const device uint4*>(source.facts(own) + at));
      }
    }
    end_copies();
  }
};

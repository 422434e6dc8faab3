// Operands of a chunk in threadgroup memory, one at a time, for the gradients of its steps.
#pragma once

#include "metal/gated_delta/chunk_tiles.h"

template <typename T, bool kPairs>
struct ChunkLoads {
  using Weight = typename ChunkNumbers<T, kPairs>::Weight;
  enum { kMemory = kChunk * (kPanel + 4) };  // floats: a tile

  threadgroup float* memory;
  FragmentPlace place;
  uint thread_index;
  ChunkPlace chunk;

  // The chunk's rows of q or k.
  METAL_FUNC const threadgroup T* keys(const device T* from, long stride, int panel) const thread {
    return load_tile<T>(memory,
                        chunk_rows<T>({from, stride, 1, 0, (panel + 1) * kPanel}, chunk, panel),
                        keys_are_vectors, thread_index);
  }

  // The chunk's rows of v or d_y.
  METAL_FUNC const threadgroup T* values(Rows<T> all, int panel) const thread {
    return load_tile<T>(memory, chunk_rows(all, chunk, panel), values_are_vectors, thread_index);
  }

  // Rows and columns of a matrix that another kernel left.
  METAL_FUNC const threadgroup Weight* numbers(const device Weight* from,
                                               long stride) const thread {
    return load_tile<Weight>(memory, {from, stride, 1, kPanel, kPanel}, true, thread_index);
  }
};

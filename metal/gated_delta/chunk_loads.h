// Operands of a chunk in threadgroup memory, one at a time, for the gradients of its steps.
#pragma once

#include "metal/gated_delta/chunk_tiles.h"

template <typename T, bool kPairs>
struct ChunkLoads {
  using Part = metal::conditional_t<kPairs, T, float>;
  enum { kStride = TileRow<Part, kPanel>::kStride };
  enum {
    kMemory = kChunk * (kPairs ? kPanel + 8 : kPanel + 4)
  };  // floats: a tile of float32, or two of 16 bits

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

  // A square of float32 numbers; with pairs, as two tiles.
  METAL_FUNC void numbers(const device float* from, long stride) const thread {
    if (!kPairs) {
      load_tile<float>(memory, {from, stride, 1, kPanel, kPanel}, true, thread_index);
      return;
    }
    enum { kUnits = kPanel / 4, kOwn = kPanel * kUnits / kChunkThreads };
    threadgroup Part* const high = reinterpret_cast<threadgroup Part*>(memory);
    float4 own[kOwn];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int at = int(thread_index) + i * kChunkThreads;
      own[i] =
          *reinterpret_cast<const device float4*>(from + at / kUnits * stride + 4 * (at % kUnits));
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int at = int(thread_index) + i * kChunkThreads;
      threadgroup Part* const to = high + at / kUnits * kStride + 4 * (at % kUnits);
      MLX_ANVIL_UNROLL
      for (int j = 0; j < 4; j += 2) {
        const Pair<Part> part = Pair<Part>(Part(own[i][j]), Part(own[i][j + 1]));
        const Pair<Part> rest =
            Pair<Part>(Part(own[i][j] - float(part.x)), Part(own[i][j + 1] - float(part.y)));
        *reinterpret_cast<threadgroup Pair<Part>*>(to + j) = part;
        *reinterpret_cast<threadgroup Pair<Part>*>(to + kPanel * kStride + j) = rest;
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

  // sum += left x those numbers, or their transpose.
  template <bool kTransposed, bool kRounded>
  METAL_FUNC void add_numbers(thread RegTile<float, 16, kChunk>& sum,
                              const thread RegTile<float, 16, kChunk>& left) const thread {
    const threadgroup Part* const tile = reinterpret_cast<const threadgroup Part*>(memory);
    add_product<kPairs, kTransposed, kRounded>(sum, left, tile, place);
    if (kPairs) {
      add_product<kPairs, kTransposed, true>(sum, left, tile + kPanel * kStride, place);
    }
  }
};

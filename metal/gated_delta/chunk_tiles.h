// Tiles of a chunk in threadgroup memory, one at a time, and the state in registers.
#pragma once

#include "metal/gated_delta/chunk.h"

enum { kChunkValues = 64 };  // rows of the state of a threadgroup

template <typename T, bool kPairs>
struct ChunkTiles {
  using Weight = typename ChunkNumbers<T, kPairs>::Weight;
  using Product = ChunkProduct<kPairs>;
  enum { kPlanes = ChunkNumbers<T, kPairs>::kPlanes };
  enum {
    kMemory = kPairs ? kChunk * TileRow<T, kChunk>::kStride / 2  // floats
                     : kChunk * TileRow<float, kChunk>::kStride
  };

  threadgroup float* memory;
  FragmentPlace place;
  uint thread_index;
  ChunkPlace chunk;

  // The chunk's rows of q or k.
  METAL_FUNC const threadgroup T* load(const device T* from, long stride, int panel) const thread {
    return load_rows<T>(chunk_rows(from, stride, chunk, panel, (panel + 1) * kPanel),
                        keys_are_vectors);
  }

  METAL_FUNC const threadgroup Weight* load_square(const device Weight* from) const thread {
    return load_rows<Weight>({from, kChunk, 1, kChunk, kChunk}, true);
  }

  template <typename U>
  METAL_FUNC SharedTile<U, TileRow<U, kChunk>::kStride> straight(
      const threadgroup U* tile) const thread {
    return {tile, place};
  }
  template <typename U>
  METAL_FUNC TransposedTile<U, TileRow<U, kChunk>::kStride> transposed(
      const threadgroup U* tile) const thread {
    return {tile, place};
  }

  // sum += left x right^T, with the high and low parts of `right`.
  METAL_FUNC void add_split(thread RegTile<float, 16, kChunk>& sum,
                            const thread RegTile<float, 16, kChunk>& left,
                            const device Weight* right) const thread {
    Product::add(sum, left, transposed(load_square(right)));
    if (kPairs) {
      Product::add_rounded(sum, left, transposed(load_square(right + kChunk * kChunk)));
    }
  }

 private:
  template <typename U>
  METAL_FUNC const threadgroup U* load_rows(Rows<U> from, bool vectors) const thread {
    threadgroup U* const tile = reinterpret_cast<threadgroup U*>(memory);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    copy_tile<U, kChunk, kPanel, kChunkThreads>(tile, from, vectors, thread_index, /*full=*/true);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    return tile;
  }
};

// Sixteen rows of a state, of which `rows` exist.
template <int kPanels>
METAL_FUNC void load_state(thread RegTile<float, 16, kPanel> (&s)[kPanels],
                           const device float* from,
                           int rows,
                           FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int panel = 0; panel < kPanels; ++panel) {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < 2 * kPanel / 8; ++f) {
      const int i = f / (kPanel / 8), n = f % (kPanel / 8);
      const int row = 8 * i + place.row;
      const int at = row * kPanels * kPanel + panel * kPanel + 8 * n + place.column;
      const float2 pair =
          row < rows ? *reinterpret_cast<const device float2*>(from + at) : float2(0.0f);
      s[panel].fragments[i][n] = fragment_of<float>(pair);
    }
  }
}

template <int kPanels>
METAL_FUNC void store_state(const thread RegTile<float, 16, kPanel> (&s)[kPanels],
                            device float* to,
                            int rows,
                            FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int panel = 0; panel < kPanels; ++panel) {
    s[panel].store(to + panel * kPanel, kPanels * kPanel, rows, kPanel, place, /*vectors=*/true,
                   /*full=*/true);
  }
}

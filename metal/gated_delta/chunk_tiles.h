// Tiles of a chunk in threadgroup memory, one at a time, and the state in registers.
#pragma once

#include "metal/gated_delta/chunk.h"

enum { kChunkValues = 64 };  // rows of the state of a threadgroup

// Columns of v, and rows of the state, with those of the last threadgroup that do not exist.
METAL_FUNC long value_columns(constant GatedDeltaParams& params) {
  return (params.value_dim + kChunkValues - 1) / kChunkValues * kChunkValues;
}

template <typename T, bool kPairs>
struct ChunkTiles {
  using Weight = typename ChunkNumbers<T, kPairs>::Weight;
  using Product = ChunkProduct<kPairs>;
  enum { kPlanes = ChunkNumbers<T, kPairs>::kPlanes };
  enum {
    kMemory = kPairs ? kChunk * TileRow<T, kChunk>::kStride / 2  // floats
                     : kChunk * TileRow<float, kChunk>::kStride,
    kNumbersMemory = kChunk * TileRow<float, kChunk>::kStride + (kPairs ? 256 : 0)
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

  // A panel of v or d_y, of which `from` are the chunk's rows.
  METAL_FUNC const threadgroup T* load_values(Rows<T> from, int panel) const thread {
    from.data += panel * kPanel;
    from.columns -= panel * kPanel;
    return load_rows<T>(from, values_are_vectors, /*full=*/false);
  }

  // The SIMD group's rows of such a tile.
  METAL_FUNC void read(thread RegTile<float, 16, kPanel>& to,
                       const threadgroup T* tile,
                       int row) const thread {
    enum { kStride = TileRow<T, kPanel>::kStride };
    RegTile<T, 16, kPanel> own;
    own.load(tile + row * kStride, kStride, place);
    to = own.template to<float>();
  }

  // A square of float32 numbers; with pairs, as two tiles.
  METAL_FUNC void load_numbers(const device float* from, long stride) const thread {
    if (!kPairs) {
      load_rows<float>({from, stride, 1, kPanel, kPanel}, true);
      return;
    }
    enum { kStride = TileRow<T, kPanel>::kStride, kUnits = kPanel / 4 };
    threadgroup T* const high = reinterpret_cast<threadgroup T*>(memory);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = int(thread_index); i < kPanel * kUnits; i += kChunkThreads) {
      const int row = i / kUnits, column = 4 * (i % kUnits);
      const float4 x = *reinterpret_cast<const device float4*>(from + row * stride + column);
      MLX_ANVIL_UNROLL
      for (int j = 0; j < 4; ++j) {
        const T part = T(x[j]);
        high[row * kStride + column + j] = part;
        high[(kPanel + row) * kStride + column + j] = T(x[j] - float(part));
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

  // sum += left x those numbers, or their transpose.
  template <bool kTransposed, bool kRounded>
  METAL_FUNC void add_numbers(thread RegTile<float, 16, kChunk>& sum,
                              const thread RegTile<float, 16, kChunk>& left) const thread {
    const threadgroup Weight* const tile = reinterpret_cast<const threadgroup Weight*>(memory);
    add<kTransposed, kRounded>(sum, left, tile);
    if (kPairs) {
      add<kTransposed, true>(sum, left, tile + kPanel * TileRow<Weight, kPanel>::kStride);
    }
  }

  // sum += left x right, or its transpose, of a matrix with all its planes.
  template <bool kTransposed>
  METAL_FUNC void add_square(thread RegTile<float, 16, kChunk>& sum,
                             const thread RegTile<float, 16, kChunk>& left,
                             const device Weight* right) const thread {
    add<kTransposed, false>(sum, left, load_square(right));
    if (kPairs) {
      add<kTransposed, true>(sum, left, load_square(right + kChunk * kChunk));
    }
  }

  // sum += left x right, or its transpose. `kRounded`: with the high parts of `left` alone.
  template <bool kTransposed, bool kRounded, typename U>
  METAL_FUNC void add(thread RegTile<float, 16, kChunk>& sum,
                      const thread RegTile<float, 16, kChunk>& left,
                      const threadgroup U* right) const thread {
    using Operand =
        metal::conditional_t<kTransposed, TransposedTile<U, TileRow<U, kChunk>::kStride>,
                             SharedTile<U, TileRow<U, kChunk>::kStride> >;
    const Operand operand = {right, place};
    if (kRounded) {
      Product::add_rounded(sum, left, operand);
    } else {
      Product::add(sum, left, operand);
    }
  }

 private:
  template <typename U>
  METAL_FUNC const threadgroup U* load_rows(Rows<U> from,
                                            bool vectors,
                                            bool full = true) const thread {
    threadgroup U* const tile = reinterpret_cast<threadgroup U*>(memory);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    copy_tile<U, kChunk, kPanel, kChunkThreads>(tile, from, vectors, thread_index, full);
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

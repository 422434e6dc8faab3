// Tiles of a chunk in threadgroup memory, one at a time, and the state in registers.
#pragma once

#include "metal/common/group_product.h"
#include "metal/gated_delta/chunk.h"

// A tile for products of four SIMD groups (metal/common/group_product.h). Others have padded rows.
template <typename T>
struct GroupTile {
  const threadgroup T* data;
};

// value_dim, rounded up to the rows of whole threadgroups.
METAL_FUNC long value_columns(constant GatedDeltaParams& params) {
  return (params.value_dim + kChunkValues - 1) / kChunkValues * kChunkValues;
}

// Loads a tile of 64 rows and columns in the place of another. All threads call it. A thread has
// all its loads in flight before it waits for the others.
template <typename U>
METAL_FUNC const threadgroup U* load_tile(threadgroup float* memory,
                                          Rows<U> from,
                                          bool vectors,
                                          uint thread_index) {
  threadgroup U* const tile = reinterpret_cast<threadgroup U*>(memory);
  TileShare<U, kChunk, kPanel, kChunkThreads> share;
  if (vectors) {
    share.load(from, /*full=*/false, thread_index);
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (vectors) {
    share.store(tile, thread_index);
  } else {
    copy_tile<U, kChunk, kPanel, kChunkThreads>(tile, from, false, thread_index);
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return tile;
}

// sum += left x right, or its transpose, of a tile whose numbers are exact: of k, q, v, or a part
// of another matrix. `kRounded`: with pairs, the high parts of `left` alone.
template <bool kPairs, bool kTransposed, bool kRounded, typename U>
METAL_FUNC void add_product(thread RegTile<float, 16, kChunk>& sum,
                            const thread RegTile<float, 16, kChunk>& left,
                            const threadgroup U* right,
                            FragmentPlace place) {
  enum { kStride = TileRow<U, kChunk>::kStride };
  using Operand =
      metal::conditional_t<kTransposed, TransposedTile<U, kStride>, SharedTile<U, kStride> >;
  const Operand operand = {right, place};
  if (!kPairs) {
    sum.mma(left, Widened<Operand>{operand});
    return;
  }
  const RegTile<U, 16, kChunk> high = left.template to<U>();
  sum.mma(high, operand);
  if (!kRounded) {
    sum.mma(low_parts(left, high), operand);
  }
}

// The same by four SIMD groups, which all call it. The products run until finish_products().
template <bool kPairs, bool kTransposed, bool kRounded, typename T>
METAL_FUNC void add_product(thread RegTile<float, 16, kChunk>& sum,
                            const thread RegTile<float, 16, kChunk>& left,
                            GroupTile<T> right,
                            FragmentPlace place) {
  using Operand = metal::conditional_t<kTransposed, TransposedSwizzledOperand<T, kChunk, kChunk>,
                                       SwizzledOperand<T, kChunk, kChunk> >;
  const Operand operand = {right.data, place};
  const RegTile<T, 16, kChunk> high = left.template to<T>();
  start_product(sum, high, operand, true);
  if (!kRounded) {
    start_product(sum, low_parts(left, high), operand, true);
  }
}

// Waits for the products of a sum, before its use and before tiles change.
template <bool kGroups>
METAL_FUNC void finish_products(thread RegTile<float, 16, kChunk>& sum) {
  if (kGroups) {
    wait_for_products<0>(sum);
  }
}

// A SIMD group's rows of a tile.
template <typename T>
METAL_FUNC void read_tile(thread RegTile<float, 16, kPanel>& to,
                          const threadgroup T* tile,
                          int row,
                          FragmentPlace place) {
  enum { kStride = TileRow<T, kPanel>::kStride };
  RegTile<T, 16, kPanel> own;
  own.load(tile + row * kStride, kStride, place);
  to = own.template to<float>();
}

template <typename T>
METAL_FUNC void read_tile(thread RegTile<float, 16, kPanel>& to,
                          GroupTile<T> tile,
                          int row,
                          FragmentPlace place) {
  const SwizzledRows<T, kChunk, kPanel> rows = {tile.data, row, 0, place};
  MLX_ANVIL_UNROLL
  for (int f = 0; f < 2 * kPanel / 8; ++f) {
    const int i = f / (kPanel / 8), n = f % (kPanel / 8);
    const Pair<T> pair = elements_of(rows.block(i, n));
    to.fragments[i][n] = fragment_of<float>(float(pair.x), float(pair.y));
  }
}

// sums[i] += the lane's share of the squares of rows i.
template <typename T, int kColumns>
METAL_FUNC void add_squares(const thread RegTile<T, 16, kColumns>& tile, thread float (&sums)[2]) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 2; ++i) {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      const Pair<T> pair = elements_of(tile.fragments[i][n]);
      sums[i] += float(pair.x) * float(pair.x) + float(pair.y) * float(pair.y);
    }
  }
}

// A SIMD group's columns of a tile, as rows.
template <typename U, typename T>
METAL_FUNC void read_tile_transposed(thread RegTile<U, 16, kPanel>& to,
                                     const threadgroup T* tile,
                                     int column,
                                     FragmentPlace place) {
  const TransposedTile<T, TileRow<T, kPanel>::kStride> transposed = {tile + column, place};
  MLX_ANVIL_UNROLL
  for (int f = 0; f < 2 * kPanel / 8; ++f) {
    const int i = f / (kPanel / 8), n = f % (kPanel / 8);
    const Pair<T> pair = elements_of(transposed.block(i, n));
    to.fragments[i][n] = fragment_of<U>(U(pair.x), U(pair.y));
  }
}

template <typename U, typename T>
METAL_FUNC void read_tile_transposed(thread RegTile<U, 16, kPanel>& to,
                                     GroupTile<T> tile,
                                     int column,
                                     FragmentPlace place) {
  using Tile = SwizzledTile<T, kChunk, kPanel>;
  MLX_ANVIL_UNROLL
  for (int f = 0; f < 2 * kPanel / 8; ++f) {
    const int i = f / (kPanel / 8), n = f % (kPanel / 8);
    const int row = 8 * n + place.column, first = column + 8 * i;
    to.fragments[i][n] = fragment_of<U>(U(tile.data[Tile::unit_at(row, first) + place.row]),
                                        U(tile.data[Tile::unit_at(row + 1, first) + place.row]));
  }
}

// Sixteen dense rows in device memory, of which `rows` exist.
template <int kColumns, typename U>
METAL_FUNC void read_rows(thread RegTile<float, 16, kColumns>& tile,
                          const device U* from,
                          long stride,
                          FragmentPlace place,
                          int rows = 16) {
  MLX_ANVIL_UNROLL
  for (int f = 0; f < 2 * kColumns / 8; ++f) {
    const int i = f / (kColumns / 8), n = f % (kColumns / 8);
    const int row = 8 * i + place.row;
    const device U* const at = from + row * stride + 8 * n + place.column;
    const Pair<U> pair = row < rows ? *reinterpret_cast<const device Pair<U>*>(at) : Pair<U>(U(0));
    tile.fragments[i][n] = fragment_of<float>(float(pair.x), float(pair.y));
  }
}

// Sixteen rows of a state.
template <int kPanels>
METAL_FUNC void load_state(thread RegTile<float, 16, kPanel> (&s)[kPanels],
                           const device float* from,
                           int rows,
                           FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int panel = 0; panel < kPanels; ++panel) {
    read_rows(s[panel], from + panel * kPanel, kPanels * kPanel, place, rows);
  }
}

template <int kPanels, typename U>
METAL_FUNC void store_state(const thread RegTile<float, 16, kPanel> (&s)[kPanels],
                            device U* to,
                            int rows,
                            FragmentPlace place) {
  MLX_ANVIL_UNROLL
  for (int panel = 0; panel < kPanels; ++panel) {
    s[panel].store(to + panel * kPanel, kPanels * kPanel, rows, kPanel, place, /*vectors=*/true,
                   /*full=*/true);
  }
}

// Stores 16 rows of a matrix, with two planes its high and low parts.
template <int kPlanes, typename Weight>
METAL_FUNC void store_planes(const thread RegTile<float, 16, kChunk>& tile,
                             device Weight* to,
                             int row,
                             FragmentPlace place) {
  device Weight* const own = to + row * kChunk;
  tile.store(own, kChunk, 16, kChunk, place, /*vectors=*/true, /*full=*/true);
  if (kPlanes == 2) {
    RegTile<float, 16, kChunk> rest = tile.template to<Weight>().template to<float>();
    rest.negate();
    rest.add(tile);
    rest.store(own + kChunk * kChunk, kChunk, 16, kChunk, place, /*vectors=*/true, /*full=*/true);
  }
}

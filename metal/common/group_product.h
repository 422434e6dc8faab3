// Matrix products of four SIMD groups with a tile in threadgroup memory, which run while the
// threads go on. PTX for compute capability 9.0 has them (wgmma). On other targets a product
// completes when it starts, and each SIMD group computes its rows by itself.
//
// A SIMD group has 16 rows of the sum in registers (RegTile), and of the left operand in registers
// or in a tile. SIMD groups 4 i to 4 i + 3 call the functions together. From start_product() to the
// wait, a sum may not be used, nor its operands changed.
#pragma once

#include <metal_stdlib>

#include "metal/common/reg_tile.h"

// A tile of 16-bit elements as these products read it: panels of 64 columns. A row of a panel is
// eight units of 16 bytes; row r has unit u in place u ^ (r % 8), so that reads along rows and
// along columns have no bank conflicts. A panel starts at a multiple of 1024 bytes.
template <typename T, int kRows, int kColumns>
struct SwizzledTile {
  static_assert(sizeof(T) == 2 && kRows % 16 == 0 && kColumns % 64 == 0, "whole panels");
  enum { kUnit = 8, kPanelColumns = 64, kPanel = kRows * kPanelColumns };
  enum { kSize = kRows * kColumns };  // elements

  // Element (row, column), where column is a multiple of kUnit.
  METAL_FUNC static int unit_at(int row, int column) {
    const int unit = column % kPanelColumns / kUnit;
    return column / kPanelColumns * kPanel + row * kPanelColumns + (unit ^ row % 8) * kUnit;
  }

  // Starts asynchronous copies of all rows by kThreads threads (async_copy.h). Rows are vectors.
  template <int kThreads>
  METAL_FUNC static void start_copies(threadgroup T* to, Rows<T> from, uint thread_index) {
    enum { kUnits = kColumns / kUnit, kStep = kThreads / kUnits };
    static_assert(kThreads % kUnits == 0 && kStep % 8 == 0 && kRows % kStep == 0, "equal shares");
    const int row = thread_index / kUnits, column = thread_index % kUnits * kUnit;
    const int stride = int(from.row_stride), source = row * stride + column;
    threadgroup T* target = to + unit_at(row, column);
    MLX_ANVIL_UNROLL
    for (int first = 0; first < kRows; first += kStep) {
      start_copy(reinterpret_cast<threadgroup uint4*>(target + first * kPanelColumns),
                 reinterpret_cast<const device uint4*>(from.data + (source + first * stride)),
                 row + first < from.rows && column < from.columns);
    }
  }
};

// Left operand: 64 rows of such a tile for four SIMD groups, from row `first` on.
template <typename T, int kTileRows, int kTileColumns>
struct SwizzledRows {
  using Element = T;
  using Tile = SwizzledTile<T, kTileRows, kTileColumns>;
  enum { kColumnFragments = kTileColumns / 8, kRows = kTileRows };

  const threadgroup T* data;
  int first;
  int simdgroup;  // of the four
  FragmentPlace place;

  METAL_FUNC Fragment<T> block(int i, int n) const thread {
    const int row = first + 16 * simdgroup + 8 * i + place.row;
    return load_fragment(data + Tile::unit_at(row, 8 * n) + place.column);
  }
};

// Right operands: such a tile, and its transpose.
template <typename T, int kTileRows, int kTileColumns>
struct SwizzledOperand {
  using Element = T;
  using Tile = SwizzledTile<T, kTileRows, kTileColumns>;
  enum { kInOrder = false, kRows = kTileRows, kRowsAreInner = true, kFirst = 0 };

  const threadgroup T* data;
  FragmentPlace place;

  METAL_FUNC Fragment<T> block(int i, int n) const thread {
    return load_fragment(data + Tile::unit_at(8 * i + place.row, 8 * n) + place.column);
  }
};

// `kFirstColumn`: its rows from that one on. Products take 16 at a time.
template <typename T, int kTileRows, int kTileColumns, int kFirstColumn = 0>
struct TransposedSwizzledOperand {
  using Element = T;
  using Tile = SwizzledTile<T, kTileRows, kTileColumns>;
  enum { kInOrder = false, kRows = kTileRows, kRowsAreInner = false, kFirst = kFirstColumn };
  static_assert(kFirst < int(Tile::kPanelColumns), "a column of the first panel");

  const threadgroup T* data;
  FragmentPlace place;

  METAL_FUNC Fragment<T> block(int i, int n) const thread {
    const int row = 8 * n + place.column;
    return fragment_of<T>(data[Tile::unit_at(row, kFirst + 8 * i) + place.row],
                          data[Tile::unit_at(row + 1, kFirst + 8 * i) + place.row]);
  }
};

// Starts sum = left x right + (adds ? sum : 0).
template <typename T, int kColumns, int kDepth, typename Right>
METAL_FUNC void start_product(thread RegTile<float, 16, kColumns>& sum,
                              const thread RegTile<T, 16, kDepth>& left,
                              Right right,
                              bool adds) {
#ifdef __MSLC_PTX__
  mslc::start_product<bool(Right::kRowsAreInner), Right::kRows>(
      sum.fragments, left.fragments, right.data + int(Right::kFirst), adds);
#else
  if (!adds) {
    sum.zero();
  }
  sum.mma(left, right);
#endif
}

template <typename T, int kColumns, int kTileRows, int kDepth, typename Right>
METAL_FUNC void start_product(thread RegTile<float, 16, kColumns>& sum,
                              SwizzledRows<T, kTileRows, kDepth> left,
                              Right right,
                              bool adds) {
#ifdef __MSLC_PTX__
  mslc::start_product<bool(Right::kRowsAreInner), Right::kRows, kTileRows, kDepth / 8>(
      sum.fragments, left.data + 64 * left.first, right.data + int(Right::kFirst), adds);
#else
  if (!adds) {
    sum.zero();
  }
  sum.mma(left, right);
#endif
}

// Waits until at most the last kPending products are running; `sum` is that of an earlier one.
template <int kPending, int kColumns>
METAL_FUNC void wait_for_products(thread RegTile<float, 16, kColumns>& sum) {
#ifdef __MSLC_PTX__
  mslc::wait_for_products<kPending>(sum.fragments);
#endif
}

// The same if no sum is used: operands of the earlier products may then be changed.
template <int kPending>
METAL_FUNC void wait_for_products() {
#ifdef __MSLC_PTX__
  mslc::wait_for_products<kPending>();
#endif
}

// Keeps the next wait after the computation of `result`, which is never negative: assemblers move
// waits up. `tile` is any threadgroup memory.
template <typename T>
METAL_FUNC void compute_before_wait(float result, const threadgroup T* tile) {
#ifdef __MSLC_PTX__
  mslc::finish_before_wait(result, tile);
#endif
}

// Waits until at most the last kPending groups of this thread's copies to tiles are in flight.
// After a barrier, products may read the others.
template <int kPending = 0>
METAL_FUNC void wait_for_tiles() {
  wait_for_copies<kPending>();
#ifdef __MSLC_PTX__
  mslc::show_to_products();
#endif
}

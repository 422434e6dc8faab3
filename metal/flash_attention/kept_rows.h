// Rows that a simdgroup keeps while tiles of other rows pass: queries, or keys and values.
#pragma once

#include "metal/common/reg_tile.h"
#include "metal/flash_attention/scores.h"

// Where kept rows stay while the others pass.
enum Keeping {
  kKeptNowhere,      // device memory, reloaded for each tile
  kKeptInRegisters,  // registers of the simdgroup that owns the rows
  kKeptInMemory,     // threadgroup memory
};

// kRows rows of an operand of kColumns columns. `Right` is how a passing tile of kTileRows rows
// becomes the right operand of a product.
template <typename T,
          int kColumns,
          int kRows,
          int kTileRows,
          Keeping kKeeping,
          typename Right = TransposedTile<T, TileRow<T, kColumns>::kStride> >
struct KeptRows {
  enum { kStride = TileRow<T, kColumns>::kStride };
  enum { kStaged = kKeeping == kKeptInMemory ? kRows * kStride : 0 };  // elements in memory

  Rows<T> rows;  // of the head, from row 0 of the simdgroup on
  FragmentPlace place;
  const threadgroup T* in_memory;  // row 0, for kKeptInMemory
  RegTile<T, kRows, kKeeping == kKeptInRegisters ? kColumns : 8> held;

  METAL_FUNC void begin(Rows<T> all, int first_row, FragmentPlace of_lane) thread {
    rows = rows_from(all, first_row);
    place = of_lane;
    if (kKeeping == kKeptInRegisters) {
      held.load(rows, 0, place, rows_are_vectors, heads_fill_tile);
    }
  }

  // For kKeptInMemory: copies the rows of all SIMD groups, which start at `block`, with kThreads
  // threads. The barrier of the first tile makes them visible.
  template <int kThreads>
  METAL_FUNC void stage(
      threadgroup T* to, Rows<T> all, int block, uint simdgroup, uint thread_index) thread {
    if (kKeeping == kKeptInMemory) {
      copy_tile<T, kThreads / 32 * kRows, kColumns, kThreads>(
          to, rows_from(all, block), rows_are_vectors, thread_index, heads_fill_tile);
      in_memory = to + simdgroup * kRows * kStride;
    }
  }

  // Returns kept rows x tile^T.
  METAL_FUNC RegTile<float, kRows, kTileRows> multiply(const threadgroup T* tile) thread {
    RegTile<float, kRows, kTileRows> products;
    products.zero();
    if (kKeeping == kKeptInRegisters) {
      products.mma(held, Right{tile, place});
    } else if (kKeeping == kKeptInMemory) {
      products.mma(SharedTile<T, kStride, false, kColumns>{in_memory, place}, Right{tile, place});
    } else {
      // This loop must not unroll: the compiler would hoist all loads, and use the registers that
      // reloading is meant to save.
      MLX_ANVIL_NO_UNROLL
      for (int column = 0; column < kColumns; column += 8) {
        held.load(rows, column, place, rows_are_vectors, heads_fill_tile);
        products.mma(held, Right{tile + column, place});
      }
    }
    return products;
  }
};

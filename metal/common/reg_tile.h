// Register tiles: matrices of 8x8 fragments (tile.h) in the registers of a simdgroup.
//
// Kernels read like their pseudocode:
//   S = 0; S += a b                        zero, mma
//   x = f(row, column, x)                  map
//   rowmax(S), rowsum(S), S *= factor      row_max, row_sum, scale_row
//   load and store rows in device memory   load, store
//
// A lane has elements of one row of each row i of fragments: row 8 * i + place.row. Methods that
// end in _row take i, a compile-time constant, with which kernels also index what they keep per
// row. Functions are structs with operator(), because Metal 3.1 has no lambdas.
#pragma once

#include <metal_stdlib>

#include "metal/common/tile.h"
#include "metal/common/unroll.h"

template <typename T, int kRows, int kColumns>
struct RegTile {
  using Element = T;
  enum { kInOrder = false };  // see SharedTile
  enum { kRowFragments = kRows / 8, kColumnFragments = kColumns / 8 };
  enum { kFragments = kRowFragments * kColumnFragments };
  static_assert(kRows % 8 == 0 && kColumns % 8 == 0, "whole fragments");

  Fragment<T> fragments[kRowFragments][kColumnFragments];

  METAL_FUNC Fragment<T> block(int i, int n) const thread { return fragments[i][n]; }

  METAL_FUNC void zero() thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      fragments[f / kColumnFragments][f % kColumnFragments] = fragment_of<T>(T(0), T(0));
    }
  }

  // Adds left x right. Both have block(i, n), which returns a fragment: register tiles, or tiles in
  // threadgroup memory (below). Each block is loaded once.
  template <typename Left, typename Right>
  METAL_FUNC void mma(const thread Left& left, const thread Right& right) thread {
    MLX_ANVIL_UNROLL
    for (int k = 0; k < int(Left::kColumnFragments); ++k) {
      keep_order<bool(Right::kInOrder)>();
      Fragment<typename Right::Element> column[kRowFragments];
      load_column(left, k, column);
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kColumnFragments; ++n) {
        multiply_accumulate(n, column, right.block(k, n));
      }
    }
  }

  // The same, one column of fragments after the other: fewer blocks of the right operand are in
  // registers at a time. The left operand is in registers anyway.
  template <typename U, int kDepth, typename Right>
  METAL_FUNC void mma_by_columns(const thread RegTile<U, kRows, kDepth>& left,
                                 const thread Right& right) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kColumnFragments; ++n) {
      keep_order<bool(Right::kInOrder)>();
      MLX_ANVIL_UNROLL
      for (int k = 0; k < kDepth / 8; ++k) {
        Fragment<typename Right::Element> column[kRowFragments];
        load_column(left, k, column);
        multiply_accumulate(n, column, right.block(k, n));
      }
    }
  }

  // The same elements, rounded to another type.
  template <typename U>
  METAL_FUNC RegTile<U, kRows, kColumns> to() const thread {
    RegTile<U, kRows, kColumns> result;
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      const int i = f / kColumnFragments, n = f % kColumnFragments;
      const Pair<T> pair = elements_of(fragments[i][n]);
      result.fragments[i][n] = fragment_of<U>(static_cast<U>(pair.x), static_cast<U>(pair.y));
    }
    return result;
  }

  METAL_FUNC void add(const thread RegTile& other) thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      const int i = f / kColumnFragments, n = f % kColumnFragments;
      fragments[i][n] =
          fragment_of<T>(elements_of(fragments[i][n]) + elements_of(other.fragments[i][n]));
    }
  }

  // x = f(row, column, x), for each element x. `row` and `column` are those of the lane's first
  // element. If they count within the tile, place.row and place.column, compilers may compute all
  // coordinates ahead of the loop over tiles and keep them in registers.
  template <typename Function>
  METAL_FUNC void map(int row, int column, Function f) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      map_row(i, row, column, f);
    }
  }

  template <typename Function>
  METAL_FUNC void map_row(int i, int row, int column, Function f) thread {
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 2 * kColumnFragments; ++e) {
      thread Fragment<T>& x = fragments[i][e / 2];
      x.thread_elements()[e % 2] =
          f(row + 8 * i, column + 8 * (e / 2) + e % 2, x.thread_elements()[e % 2]);
    }
  }

  // (x, y) = f(row, column, x, y), for y in `other`.
  template <typename Function>
  METAL_FUNC void map_row(int i, int row, int column, thread RegTile& other, Function f) thread {
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 2 * kColumnFragments; ++e) {
      thread Fragment<T>& x = fragments[i][e / 2];
      thread Fragment<T>& y = other.fragments[i][e / 2];
      const Pair<T> both = f(row + 8 * i, column + 8 * (e / 2) + e % 2, x.thread_elements()[e % 2],
                             y.thread_elements()[e % 2]);
      x.thread_elements()[e % 2] = both.x;
      y.thread_elements()[e % 2] = both.y;
    }
  }

  template <typename Function>
  METAL_FUNC void map(int row, int column, thread RegTile& other, Function f) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      map_row(i, row, column, other, f);
    }
  }

  METAL_FUNC float row_max(int i) const thread {
    float highest = -INFINITY;
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kColumnFragments; ++n) {
      const float2 pair = elements_of(fragments[i][n]);
      highest = metal::fmax(highest, metal::fmax(pair.x, pair.y));
    }
    return ::row_max(highest);
  }

  // Returns `before` plus this lane's elements of the row. ::row_sum adds up the lanes; kernels do
  // that once, after the last tile.
  METAL_FUNC float row_sum(int i, float before) const thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kColumnFragments; ++n) {
      const float2 pair = elements_of(fragments[i][n]);
      before += pair.x + pair.y;
    }
    return before;
  }

  METAL_FUNC void scale_row(int i, float factor) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kColumnFragments; ++n) {
      fragments[i][n] = fragment_of<T>(elements_of(fragments[i][n]) * factor);
    }
  }

  METAL_FUNC void scale(float factor) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      scale_row(i, factor);
    }
  }

  METAL_FUNC void negate() thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      const int i = f / kColumnFragments, n = f % kColumnFragments;
      const Pair<T> pair = elements_of(fragments[i][n]);
      fragments[i][n] = fragment_of<T>(-pair.x, -pair.y);
    }
  }

  // Loads rows from the first and columns from `column` on.
  METAL_FUNC void load(
      Rows<T> from, int column, FragmentPlace place, bool vectors, bool full) thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      const int i = f / kColumnFragments, n = f % kColumnFragments;
      const Pair<T> pair =
          load_pair(from, 8 * i + place.row, column + 8 * n + place.column, vectors, full);
      fragments[i][n] = fragment_of<T>(pair.x, pair.y);
    }
  }

  // Loads a tile in threadgroup memory, two elements at a time.
  METAL_FUNC void load(const threadgroup T* from, int row_stride, FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      const int i = f / kColumnFragments, n = f % kColumnFragments;
      fragments[i][n] =
          load_fragment(from + (8 * i + place.row) * row_stride + 8 * n + place.column);
    }
  }

  // Stores row i from column `first` of the row `to` on. Columns from `columns` on are not written.
  template <typename U>
  METAL_FUNC void store_row(int i,
                            device U* to,
                            int first,
                            int columns,
                            FragmentPlace place,
                            bool vectors,
                            bool full = false) const thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kColumnFragments; ++n) {
      store_pair(to, first + 8 * n + place.column, columns, elements_of(fragments[i][n]), vectors,
                 full);
    }
  }

  // Stores rows from `to` on. Rows from `rows` on are not written.
  template <typename U>
  METAL_FUNC void store(device U* to,
                        long row_stride,
                        int rows,
                        int columns,
                        FragmentPlace place,
                        bool vectors,
                        bool full) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const int row = 8 * i + place.row;
      if (row < rows) {
        device U* const at = vectors ? to + row * int(row_stride) : to + row * row_stride;
        store_row(i, at, 0, columns, place, vectors, full);
      }
    }
  }

  // Loads and stores whole fragments, one after the other. `at` is the lane's first pair.
  METAL_FUNC void load_fragments(const device T* at) thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      const Pair<T> pair = *reinterpret_cast<const device Pair<T>*>(at + 64 * f);
      fragments[f / kColumnFragments][f % kColumnFragments] = fragment_of<T>(pair.x, pair.y);
    }
  }

  METAL_FUNC void store_fragments(device T* at) const thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      *reinterpret_cast<device Pair<T>*>(at + 64 * f) =
          elements_of(fragments[f / kColumnFragments][f % kColumnFragments]);
    }
  }

 private:
  // Column k of the fragments of a left operand.
  template <typename Left, typename U>
  METAL_FUNC static void load_column(const thread Left& left,
                                     int k,
                                     thread Fragment<U> (&column)[kRowFragments]) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      column[i] = left.block(i, k);
    }
  }

  // Adds column x row to column n of fragments.
  template <typename U>
  METAL_FUNC void multiply_accumulate(int n,
                                      const thread Fragment<U> (&column)[kRowFragments],
                                      Fragment<U> row) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      metal::simdgroup_multiply_accumulate(fragments[i][n], column[i], row, fragments[i][n]);
    }
  }

  template <bool kKeep>
  METAL_FUNC static void keep_order() {
    if (kKeep) {
      metal::simdgroup_barrier(metal::mem_flags::mem_none);
    }
  }
};

// ---- operands of RegTile::mma in threadgroup memory

// A tile whose rows are kStride elements apart. kKeepsOrder keeps loads where they are in the
// source: the compiler would hoist them, which takes registers that wide tiles do not have.
template <typename T, int kStride, bool kKeepsOrder = false, int kColumns = 8>
struct SharedTile {
  using Element = T;
  enum { kInOrder = kKeepsOrder };
  enum { kColumnFragments = kColumns / 8 };  // of a left operand

  const threadgroup T* data;
  FragmentPlace place;

  METAL_FUNC Fragment<T> block(int i, int n) const thread {
    return load_block(data, 8 * (i * kStride + n), kStride, place);
  }
};

// The transpose of such a tile. `kOneByOne` is as for load_transposed.
template <typename T, int kStride, bool kKeepsOrder = false, bool kOneByOne = sizeof(T) == 4>
struct TransposedTile {
  using Element = T;
  enum { kInOrder = kKeepsOrder };

  const threadgroup T* data;
  FragmentPlace place;

  METAL_FUNC Fragment<T> block(int i, int n) const thread {
    return load_transposed<T, kOneByOne>(data, 8 * (n * kStride + i), kStride, place);
  }
};

// Tiles of x in threadgroup memory, as pairs of elements: what a lane has of a fragment. The pairs
// of four fragments, for 32 rows of x, are adjacent, so that a lane loads them at once.
#pragma once

#include <metal_stdlib>

#include "metal/common/tile.h"
#include "metal/common/unroll.h"

enum { kPairedRows = 32, kPairedColumns = 64, kPairedFragments = kPairedRows / 8 };
enum { kPairedThreads = 128 };

// Rows of x in device memory. Offsets are 32 bits, from the start of the array.
template <typename T>
struct RowsOfX {
  const device T* x;
  uint first;   // element
  int rows;     // rows past the last repeat it
  int columns;  // per row; columns past the last are zero

  METAL_FUNC uint at(int row, int column) const thread {
    return first + uint(metal::min(row, rows - 1)) * uint(columns) + uint(column);
  }
};

// Loads kCount elements (4 or 8) of a row, which are elements `at` of the array and columns
// `column` of the row on. `vectors` promises that rows consist of aligned vectors of 16 bytes;
// `exist`, that the elements do.
template <int kCount, typename T>
METAL_FUNC void load_elements(
    RowsOfX<T> from, uint at, int column, bool vectors, bool exist, thread T (&to)[kCount]) {
  enum { kUnit = 8 / sizeof(T), kUnits = kCount / kUnit };  // of 8 bytes
  if (!vectors) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kCount; ++i) {
      to[i] = exist || column + i < from.columns ? from.x[at + i] : T(0);
    }
    return;
  }
  uint2 units[kUnits];
  if (kUnits == 1) {
    units[0] = uint2(0);
    if (exist || column < from.columns) {
      units[0] = reinterpret_cast<const device uint2*>(from.x)[at / kUnit];
    }
  } else {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kUnits; i += 2) {
      uint4 two = uint4(0);
      if (exist || column + i * kUnit < from.columns) {
        two = reinterpret_cast<const device uint4*>(from.x)[at / (2 * kUnit) + i / 2];
      }
      units[i] = two.xy;
      units[i + (kUnits > 1 ? 1 : 0)] = two.zw;
    }
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kCount; ++i) {
    to[i] = as_type<metal::vec<T, int(kUnit)>>(units[i / kUnit])[i % kUnit];
  }
}

// Pair p of 16 bytes.
template <typename T>
struct PairsOfWords {
  enum { kCount = 4 };
  METAL_FUNC static Pair<T> get(uint4 words, int p) { return as_type<Pair<T>>(words[p]); }
};

template <>
struct PairsOfWords<float> {
  enum { kCount = 2 };
  METAL_FUNC static float2 get(uint4 words, int p) {
    return as_type<float2>(uint2(words[2 * p], words[2 * p + 1]));
  }
};

template <typename T>
METAL_FUNC void load_unit(const threadgroup Pair<T>* unit,
                          thread Pair<T> (&pairs)[kPairedFragments]) {
  enum { kPairs = PairsOfWords<T>::kCount };
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kPairedFragments / kPairs; ++i) {
    const uint4 words = reinterpret_cast<const threadgroup uint4*>(unit)[i];
    MLX_ANVIL_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      pairs[kPairs * i + p] = PairsOfWords<T>::get(words, p);
    }
  }
}

// Pairs of rows 8 i + 2 q and 8 i + 2 q + 1, in units of the same q and column.
template <typename T>
struct PairedRows {
  // The unit between blocks of eight columns, and between rows, avoids bank conflicts.
  enum { kStride = kPairedColumns + kPairedColumns / 8 + 1 };
  enum { kSize = 4 * kStride * kPairedFragments };  // pairs

  METAL_FUNC static uint place(uint q, uint column) {
    return (q * kStride + column + column / 8) * kPairedFragments;
  }

  // Copies the columns from `begin` on. Each thread has eight columns of two rows.
  METAL_FUNC static void copy(threadgroup Pair<T>* tile,
                              RowsOfX<T> from,
                              int begin,
                              bool vectors,
                              bool exists,
                              uint thread_index) {
    const int pair = thread_index / 8, column = 8 * (thread_index % 8);
    T even[8], odd[8];
    load_elements<8>(from, from.at(2 * pair, begin + column), begin + column, vectors, exists,
                     even);
    load_elements<8>(from, from.at(2 * pair + 1, begin + column), begin + column, vectors, exists,
                     odd);
    threadgroup Pair<T>* to = tile + place(pair % 4, column) + pair / 4;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      to[i * kPairedFragments] = Pair<T>(even[i], odd[i]);
    }
  }
};

// Pairs of columns 2 p and 2 p + 1 of rows 8 i + r, in units of the same r and p.
template <typename T>
struct PairedColumns {
  enum { kStride = kPairedColumns / 2 + 2 };
  enum { kSize = 8 * kStride * kPairedFragments };

  METAL_FUNC static uint place(uint r, uint p) { return (r * kStride + p) * kPairedFragments; }

  // Each thread has eight columns of two rows.
  METAL_FUNC static void copy(threadgroup Pair<T>* tile,
                              RowsOfX<T> from,
                              int begin,
                              bool vectors,
                              bool exists,
                              uint thread_index) {
    const int row = thread_index / 8, column = 8 * (thread_index % 8);
    MLX_ANVIL_UNROLL
    for (int half_tile = 0; half_tile < 2; ++half_tile) {
      T elements[8];
      load_elements<8>(from, from.at(row + 16 * half_tile, begin + column), begin + column, vectors,
                       exists, elements);
      threadgroup Pair<T>* to = tile + place(row % 8, column / 2) + row / 8 + 2 * half_tile;
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 4; ++i) {
        to[i * kPairedFragments] = Pair<T>(elements[2 * i], elements[2 * i + 1]);
      }
    }
  }
};

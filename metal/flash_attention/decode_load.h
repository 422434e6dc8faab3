// Loads some columns of a row of q, keys or values into the registers of a lane.
#pragma once

#include "metal/common/tile.h"
#include "metal/common/unroll.h"
#include "metal/flash_attention/scores.h"

template <int kBytes>
struct BitsOf;
template <>
struct BitsOf<4> {
  using Type = uint;
};
template <>
struct BitsOf<8> {
  using Type = uint2;
};
template <>
struct BitsOf<16> {
  using Type = uint4;
};

// Unpacks what was loaded as bits.
METAL_FUNC void split(uint word, thread float* x) {
  x[0] = as_type<float>(word);
}
template <typename T>
METAL_FUNC void split(uint word, thread T* x) {
  const Pair<T> pair = as_type<Pair<T> >(word);
  x[0] = pair.x;
  x[1] = pair.y;
}
template <typename T>
METAL_FUNC void split(uint2 words, thread T* x) {
  split(words.x, x);
  split(words.y, x + 4 / sizeof(T));
}
template <typename T>
METAL_FUNC void split(uint4 words, thread T* x) {
  split(words.xy, x);
  split(words.zw, x + 8 / sizeof(T));
}

// Loads N columns of a row from `column` on. Columns outside read as zero if `zeros`, or else as
// anything finite or not. A row past the last reads as the last, of which there is at least one,
// where rows are vectors; its scores must be -inf.
template <typename T, int N>
METAL_FUNC void load_columns(Rows<T> from, int row, int column, bool zeros, thread T* x) {
  if (rows_are_vectors) {
    enum { kBytes = N * sizeof(T) < 16 ? N * sizeof(T) : 16, kSize = kBytes / sizeof(T) };
    enum { kShift = kSize == 8 ? 3 : kSize / 2 };  // indices count what is loaded at once
    using Bits = typename BitsOf<kBytes>::Type;
    const int nearest = metal::min(row, from.rows - 1) * (int(from.row_stride) >> kShift);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < N; i += kSize) {
      const int first = column + i;
      const int leftmost = heads_fill_tile ? first : metal::min(first, from.columns - int(kSize));
      Bits bits = reinterpret_cast<const device Bits*>(from.data)[nearest + (leftmost >> kShift)];
      if (zeros && !heads_fill_tile) {
        bits = first == leftmost ? bits : Bits(0);
      }
      split(bits, x + i);
    }
  } else {
    // One address that moves on: one for each column would be kept in registers.
    const device T* at = from.data + row * from.row_stride + column * from.column_stride;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < N; ++i) {
      const bool exists = row < from.rows && column + i < from.columns;
      x[i] = exists ? *at : T(0);
      at += from.column_stride;
    }
  }
}

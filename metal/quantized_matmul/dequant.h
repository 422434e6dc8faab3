// Loads rows of quantized matrices: words, scales and biases, and the weights that they stand for.
#pragma once

#include <metal_stdlib>

#include "metal/common/pack.h"
#include "metal/common/unroll.h"
#include "metal/quantized_matmul/codes.h"

// True if rows of w and of x consist of whole, aligned vectors: 16 bytes, or for w what load_words
// loads at once. Otherwise words and elements are read one by one.
constant bool rows_are_vectors [[function_constant(0)]];

template <int kWords>
METAL_FUNC void load_words(const device uint* from, thread uint* words) {
  load_words<kWords>(from, rows_are_vectors, words);
}

// One row of w. Rows of a tile share their pointers and differ in the 32-bit offsets: sums of 64
// bits are several instructions on Apple's GPUs.
template <typename T, typename Format>
struct WeightRow {
  const device uint* words;
  const device typename Format::template Scale<T>* scales;
  const device T* biases;  // affine formats only
  uint first_word;
  uint first_group;
};

template <typename Format>
METAL_FUNC int words_per_row(int columns) {
  return columns / 16 * Format::kBits / 2;
}

// Returns row `row`, numbered over all batches.
template <typename T, typename Format>
METAL_FUNC WeightRow<T, Format> weight_row(WeightRow<T, Format> first,
                                           long row,
                                           int columns,
                                           int group_shift) {
  const long groups = row * (columns >> group_shift);
  return {first.words + row * words_per_row<Format>(columns), first.scales + groups,
          first.biases + groups, 0, 0};
}

// Returns row `row` of the tile that starts at `first`.
template <typename T, typename Format>
METAL_FUNC WeightRow<T, Format> row_of_tile(WeightRow<T, Format> first,
                                            uint row,
                                            int columns,
                                            int group_shift) {
  first.first_word += row * uint(words_per_row<Format>(columns));
  first.first_group += row * uint(columns >> group_shift);
  return first;
}

// Loads the words of the kCodes (8, 16 or 32) codes from `column` on, with the first code in the
// lowest bits. A row may end after half a chunk.
template <typename Format, int kCodes, typename T>
METAL_FUNC void load_codes(WeightRow<T, Format> row, int column, int columns, thread uint* words) {
  enum { kTotal = kCodes * Format::kBits };
  if (kTotal % 32 == 0) {
    const device uint* from = row.words + (row.first_word + uint(column) / kCodes * (kTotal / 32));
    if (kCodes <= Format::kPart || rows_are_vectors || column + kCodes <= columns) {
      load_words<kTotal / 32>(from, words);
    } else {
      load_words<Format::kPart * Format::kBits / 32>(from, words);
    }
    return;
  }
  // The codes start inside a word. The last of the words that they may touch can lie past the row.
  enum { kWords = (kTotal + 31) / 32, kAlignment = kTotal & -kTotal };
  enum { kTouched = (kTotal + 32 - kAlignment + 31) / 32 };
  const int bit = column % 32 * Format::kBits, last = Format::kBits - 1;
  const device uint* chunk = row.words + (row.first_word + uint(column) / 32 * Format::kBits);
  uint touched[kTouched];
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kTouched; ++i) {
    touched[i] = chunk[metal::min(bit / 32 + i, last)];
  }
  const uint shift = bit % 32;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kWords; ++i) {
    const uint above = i + 1 < kTouched ? touched[i + 1] << 1 << (31 - shift) : 0;
    words[i] = touched[i] >> shift | above;
  }
}

template <typename T, typename Format>
METAL_FUNC float2 scale_and_bias(WeightRow<T, Format> row, int group) {
  const uint at = row.first_group + uint(group);
  return float2(Format::scale(row.scales[at]),
                Format::kHasBiases ? static_cast<float>(row.biases[at]) : 0.0f);
}

// For dot products: a NaN code makes the scale, and so the whole sum, NaN.
template <int kCodes, typename T, typename Format>
METAL_FUNC float2 scale_and_bias_of_sum(WeightRow<T, Format> row,
                                        int group,
                                        const thread uint* words) {
  const float2 factors = scale_and_bias(row, group);
  return float2(Format::template has_nan<kCodes * Format::kBits / 32>(words) ? NAN : factors.x,
                factors.y);
}

// Format::values, with NaN codes converted to NaN.
template <typename Format>
METAL_FUNC void values_or_nan(const thread uint* words, int piece, thread float* v) {
  Format::values(words, piece, v);
  const thread uint* own = words + piece * Format::kBits / 4;
  if (Format::kBits == 8 && Format::template has_nan<2>(own)) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      v[i] = (own[i / 4] >> (8 * (i % 4)) & 0x7f) == 0x7f ? NAN : v[i];
    }
  }
}

// Loads the eight weights from `column` on, a multiple of eight. Params has
// `columns`, of a whole row, and `group_shift`.
template <typename T, typename Format, typename Params>
METAL_FUNC void load_weights(WeightRow<T, Format> row,
                             int column,
                             constant Params& params,
                             thread float* weights) {
  uint words[(8 * Format::kBits + 31) / 32];
  load_codes<Format, 8>(row, column, params.columns, words);
  values_or_nan<Format>(words, 0, weights);
  const float2 factors = scale_and_bias(row, column >> params.group_shift);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 8; ++i) {
    weights[i] = metal::fma(Format::factor() * weights[i], factors.x, factors.y);
  }
}

// Loads elements [at, at + 8) of x.
template <typename T>
METAL_FUNC void load_eight(const device T* x, uint at, thread float* to) {
  if (rows_are_vectors) {
    // Offsets in vectors fold into the load on Apple's GPUs.
    enum { kSize = Pack<T>::kSize };
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; i += kSize) {
      const device uint4* vector =
          reinterpret_cast<const device uint4*>(x) + (at / kSize + i / kSize);
      Pack<T>::load(reinterpret_cast<const device T*>(vector), to + i);
    }
  } else {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      to[i] = static_cast<float>(x[at + i]);
    }
  }
}

// Formats of quantized matrices: from packed codes to float32. csrc/quantized_matmul/problem.h
// describes the packing.
//
// A chunk is what a lane loads of a row of w at once: 16 bytes where the code size allows it, so
// that adjacent lanes load adjacent vectors. A part is a run of codes of a chunk that share a
// scale, for every group size. A piece is eight codes. A format provides
//
//   kBits, kChunk, kPart, kHasBiases, Scale<T>   T: dtype of x
//   values(words, piece, v)                      eight codes of a part, divided by factor();
//                                                undefined for NaN codes
//   scale(stored)                                separate from factor(): their product may overflow
//   has_nan<kWords>(words)                       true if any code is NaN
#pragma once

#include <metal_stdlib>

#include "metal/common/pack.h"
#include "metal/common/unroll.h"

// True if rows of w and of x consist of whole, aligned vectors: 16 bytes, or for w what load_words
// loads at once. Otherwise words and elements are read one by one.
constant bool rows_are_vectors [[function_constant(0)]];

template <int kWords>
METAL_FUNC void load_words(const device uint* from, thread uint* words) {
  if (rows_are_vectors && kWords % 4 == 0) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 four = reinterpret_cast<const device uint4*>(from)[i];
      MLX_ANVIL_UNROLL
      for (int j = 0; j < 4; ++j) {
        words[4 * i + j] = four[j];
      }
    }
  } else if (rows_are_vectors && kWords % 2 == 0) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWords / 2; ++i) {
      const uint2 two = reinterpret_cast<const device uint2*>(from)[i];
      words[2 * i] = two.x;
      words[2 * i + 1] = two.y;
    }
  } else {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWords; ++i) {
      words[i] = from[i];
    }
  }
}

// Extracts code `index` from a stream of kBits codes. A code may straddle two words.
template <int kBits>
METAL_FUNC uint code_at(const thread uint* words, int index) {
  const int bit = index * kBits, word = bit / 32, shift = bit % 32;
  if (shift + kBits <= 32) {
    return metal::extract_bits(words[word], uint(shift), uint(kBits));
  }
  const uint both = words[word] >> shift | words[word + 1] << (32 - shift);
  return both & ((1u << kBits) - 1u);
}

// Dequantises two codes per word through half: code bits placed in the exponent or mantissa field
// of a half give the value, times a power of two. Subnormals stay exact. This takes fewer
// instructions than an integer conversion per code.
METAL_FUNC void store_halves(uint bits, thread float& low, thread float& high) {
  const half2 pair = as_type<half2>(bits);
  low = static_cast<float>(pair.x);
  high = static_cast<float>(pair.y);
}

template <int kBits>
struct AffineCodes {
  enum { kChunk = 32 };
  METAL_FUNC static void values(const thread uint* words, int piece, thread float* v) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      v[i] = static_cast<float>(code_at<kBits>(words, 8 * piece + i));
    }
  }
  METAL_FUNC static float factor() { return 1.0f; }
};

// A subnormal half is an integer times 2^-24. As a cost, products with x below 2^-102 may be lost.
template <>
struct AffineCodes<4> {
  enum { kChunk = 32 };
  METAL_FUNC static void values(const thread uint* words, int piece, thread float* v) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      store_halves(words[piece] >> (4 * i) & 0x000f000fu, v[i], v[i + 4]);
    }
  }
  METAL_FUNC static float factor() { return 0x1p24f; }
};

template <>
struct AffineCodes<8> {
  enum { kChunk = 16 };
  METAL_FUNC static void values(const thread uint* words, int piece, thread float* v) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint codes = words[2 * piece + i / 2] >> (i % 2 * 8) & 0x00ff00ffu;
      store_halves(codes, v[i / 2 * 4 + i % 2], v[i / 2 * 4 + i % 2 + 2]);
    }
  }
  METAL_FUNC static float factor() { return 0x1p24f; }
};

template <int kBits_>
struct AffineFormat : AffineCodes<kBits_> {
  enum { kBits = kBits_, kPart = AffineCodes<kBits_>::kChunk, kHasBiases = 1 };
  template <typename T>
  using Scale = T;

  template <typename T>
  METAL_FUNC static float scale(T stored) {
    return static_cast<float>(stored);
  }
  template <int kWords>
  METAL_FUNC static bool has_nan(const thread uint*) {
    return false;
  }
};

template <int kPart_>
struct E2m1Format {
  enum { kBits = 4, kChunk = 32, kPart = kPart_, kHasBiases = 0 };
  template <typename T>
  using Scale = uchar;

  METAL_FUNC static void values(const thread uint* words, int piece, thread float* v) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint codes = words[piece] >> (4 * i);
      store_halves((codes & 0x00070007u) << 9 | (codes & 0x00080008u) << 12, v[i], v[i + 4]);
    }
  }
  METAL_FUNC static float factor() { return 0x1p14f; }
  template <int kWords>
  METAL_FUNC static bool has_nan(const thread uint*) {
    return false;
  }
};

// Returns 2^(stored - 127).
METAL_FUNC float e8m0(uchar stored) {
  return as_type<float>(stored == 0 ? 0x00400000u : uint(stored) << 23);
}

METAL_FUNC float e4m3(uchar stored) {
  float value, unused;
  store_halves(uint(stored & 0x7f) << 7 | uint(stored & 0x80) << 8, value, unused);
  return (stored & 0x7f) == 0x7f ? NAN : 256.0f * value;
}

struct Mxfp4Format : E2m1Format<32> {
  METAL_FUNC static float scale(uchar stored) { return e8m0(stored); }
};

struct Nvfp4Format : E2m1Format<16> {
  METAL_FUNC static float scale(uchar stored) { return e4m3(stored); }
};

struct Mxfp8Format {
  enum { kBits = 8, kChunk = 16, kPart = 16, kHasBiases = 0 };
  template <typename T>
  using Scale = uchar;

  METAL_FUNC static void values(const thread uint* words, int piece, thread float* v) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint codes = words[2 * piece + i / 2] >> (8 * (i % 2));
      store_halves((codes & 0x007f007fu) << 7 | (codes & 0x00800080u) << 8, v[i / 2 * 4 + i % 2],
                   v[i / 2 * 4 + i % 2 + 2]);
    }
  }
  METAL_FUNC static float factor() { return 0x1p8f; }
  METAL_FUNC static float scale(uchar stored) { return e8m0(stored); }

  // NaN is 0x7f with either sign: adding 1 to each byte's low 7 bits then carries into its top bit.
  template <int kWords>
  METAL_FUNC static bool has_nan(const thread uint* words) {
    uint carries = 0;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWords; ++i) {
      carries |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;
    }
    return (carries & 0x80808080u) != 0;
  }
};

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

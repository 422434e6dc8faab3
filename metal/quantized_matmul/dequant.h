// The formats of quantized matrices: from packed codes to float32. csrc/quantized_matmul/problem.h
// describes the packing.
//
// A chunk is 32 codes of one row of w, kBits words. A part is the codes of a chunk that are sure to
// share a scale: all, or half for a group of 16. Eight codes make a piece. A format has
//
//   kBits, kPart, kHasBiases, Scale<T>    T: dtype of x
//   values(words, piece, v)               of eight codes of a part, over factor()
//   scale(stored)                         apart from factor(), with which it might overflow
//   has_nan(words)                        whether a code of a part is no number
#pragma once

#include <metal_stdlib>

#include "metal/common/pack.h"
#include "metal/common/tile.h"

// Whether rows of w and of x are runs of whole, aligned 16-byte vectors (8-byte ones, of a group of
// 16). Otherwise words and elements are read one by one.
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

// Code `index` of a stream of codes of kBits; may straddle two words.
template <int kBits>
METAL_FUNC uint code_at(const thread uint* words, int index) {
  const int bit = index * kBits, word = bit / 32, shift = bit % 32;
  if (shift + kBits <= 32) {
    return metal::extract_bits(words[word], uint(shift), uint(kBits));
  }
  const uint both = words[word] >> shift | words[word + 1] << (32 - shift);
  return both & ((1u << kBits) - 1u);
}

template <int kBits_>
struct AffineFormat {
  enum { kBits = kBits_, kPart = 32, kHasBiases = 1 };
  template <typename T>
  using Scale = T;

  METAL_FUNC static void values(const thread uint* words, int piece, thread float* v) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      v[i] = static_cast<float>(code_at<kBits>(words, 8 * piece + i));
    }
  }
  METAL_FUNC static float factor() { return 1.0f; }
  template <typename T>
  METAL_FUNC static float scale(T stored) {
    return static_cast<float>(stored);
  }
  METAL_FUNC static bool has_nan(const thread uint*) { return false; }
};

// Bit fields of e2m1 and e4m3 are those of a half with fewer bits, so that moving them there gives
// the value over a power of two, of subnormal numbers too. Two codes share a word.
METAL_FUNC void store_halves(uint bits, thread float& low, thread float& high) {
  const half2 pair = metal::as_type<half2>(bits);
  low = static_cast<float>(pair.x);
  high = static_cast<float>(pair.y);
}

template <int kPart_>
struct E2m1Format {
  enum { kBits = 4, kPart = kPart_, kHasBiases = 0 };
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
  METAL_FUNC static bool has_nan(const thread uint*) { return false; }
};

// 2^(stored - 127)
METAL_FUNC float e8m0(uchar stored) {
  return metal::as_type<float>(stored == 0 ? 0x00400000u : uint(stored) << 23);
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
  enum { kBits = 8, kPart = 32, kHasBiases = 0 };
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

  // 0x7f, with either sign: adding 1 to each byte's lower bits carries into its top bit.
  METAL_FUNC static bool has_nan(const thread uint* words) {
    uint carries = 0;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      carries |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;
    }
    return (carries & 0x80808080u) != 0;
  }
};

// A row of w.
template <typename T, typename Format>
struct WeightRow {
  const device uint* words;
  const device typename Format::template Scale<T>* scales;
  const device T* biases;  // affine only
};

// Row `row` of a matrix whose rows all batches count through.
template <typename T, typename Format>
METAL_FUNC WeightRow<T, Format> weight_row(WeightRow<T, Format> first,
                                           long row,
                                           int columns,
                                           int group_shift) {
  const long groups = row * (columns >> group_shift);
  return {first.words + row * (columns / 16 * Format::kBits / 2), first.scales + groups,
          first.biases + groups};
}

// A part's scale and bias. A code that is no number makes its whole sum none.
template <typename T, typename Format>
METAL_FUNC float2 scale_and_bias(WeightRow<T, Format> row, int group, const thread uint* words) {
  const float scale = Format::scale(row.scales[group]);
  const float bias = Format::kHasBiases ? static_cast<float>(row.biases[group]) : 0.0f;
  return float2(Format::has_nan(words) ? NAN : scale, bias);
}

// Eight elements of x.
template <typename T>
METAL_FUNC void load_eight(const device T* from, thread float* x) {
  if (rows_are_vectors) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; i += Pack<T>::kSize) {
      Pack<T>::load(from + i, x + i);
    }
  } else {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      x[i] = static_cast<float>(from[i]);
    }
  }
}

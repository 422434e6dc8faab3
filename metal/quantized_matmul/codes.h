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

#include "metal/common/unroll.h"

// `vectors`: `from` is aligned to the largest vector that divides the words.
template <int kWords>
METAL_FUNC void load_words(const device uint* from, bool vectors, thread uint* words) {
  if (vectors && kWords % 4 == 0) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 four = reinterpret_cast<const device uint4*>(from)[i];
      MLX_ANVIL_UNROLL
      for (int j = 0; j < 4; ++j) {
        words[4 * i + j] = four[j];
      }
    }
  } else if (vectors && kWords % 2 == 0) {
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

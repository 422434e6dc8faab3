// Codes of a row of w in the order of products that read x as it is in memory.
//
// Of every eight adjacent columns, lane t of the four that share a row holds the pair 2 t, 2 t + 1.
// A lane takes 32 columns at a time: their kBits words, and one pair of each of four units of
// eight.
#pragma once

#include "metal/quantized_matmul/gemm_codes.h"

// pairs[u] = codes 8 u + 2 t and 8 u + 2 t + 1, in the halves of a word.
template <int kBits>
struct GemmPairs {
  enum { kMask = (1 << kBits) - 1, kIsLong = 8 * kBits > 32 };
  bool upper;  // the pair is in the upper part of a unit that is longer than a word
  uint shift;

  METAL_FUNC void start(uint t) thread {
    upper = kIsLong && t >= 2;
    shift = 2 * kBits * t - (upper ? 16 : 0);
  }

  METAL_FUNC void pairs(const thread uint (&words)[kBits], thread uint (&pairs)[4]) const thread {
    MLX_ANVIL_UNROLL
    for (int u = 0; u < 4; ++u) {
      uint unit = word_at(words, 8 * kBits * u);
      if (kIsLong) {
        unit = upper ? word_at(words, 8 * kBits * u + 16) : unit;
      }
      unit >>= shift;
      pairs[u] = (unit & uint(kMask)) | (unit << (16 - kBits) & uint(kMask) << 16);
    }
  }

 private:
  // The 32 bits from `bit` on, or as many as there are.
  METAL_FUNC static uint word_at(const thread uint (&words)[kBits], int bit) {
    const int i = bit / 32, skipped = bit % 32;
    const uint next = i + 1 < kBits ? words[i + 1 < kBits ? i + 1 : i] : 0;
    return skipped == 0 ? words[i] : words[i] >> skipped | next << 1 << (31 - skipped);
  }
};

template <>
struct GemmPairs<4> {
  uint which;  // byte t of a word, then zeros
  METAL_FUNC void start(uint t) thread { which = 0x4440 + t; }

  METAL_FUNC void pairs(const thread uint (&words)[4], thread uint (&pairs)[4]) const thread {
    MLX_ANVIL_UNROLL
    for (int u = 0; u < 4; ++u) {
      // A multiplication is not done by the units that are busy with the rest.
      pairs[u] = select_bytes(words[u], 0, which) * 0x1001 & 0x000f000fu;
    }
  }
};

template <>
struct GemmPairs<8> {
  uint which;  // bytes 2 t and 2 t + 1
  METAL_FUNC void start(uint t) thread { which = 0x2222 * t + 0x1100; }

  METAL_FUNC void pairs(const thread uint (&words)[8], thread uint (&pairs)[4]) const thread {
    MLX_ANVIL_UNROLL
    for (int u = 0; u < 4; ++u) {
      pairs[u] = select_bytes(words[2 * u], words[2 * u + 1], which) & 0x00ff00ffu;
    }
  }
};

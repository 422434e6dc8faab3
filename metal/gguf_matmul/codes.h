// GGUF's blocks: from their bytes to float32. csrc/gguf_matmul/problem.h describes the layouts.
//
// A unit is 16 adjacent columns of a block, which share a scale. A chunk is 16 bytes of codes. With
// 4-bit codes it has two units, its sides: one in the low bits of each byte, one in the high bits.
// A piece is eight columns of a unit. A format provides
//
//   kColumns, kBytes, kAlignment          of a block; blocks start at multiples of kAlignment
//   kSides, kHasMins                      units per chunk; whether factors have a minimum
//   unit(chunk, side), chunk(unit), side(unit)   numbered within the block
//   load<kWords>(block, chunk, first, words)     4 * kWords bytes of a chunk from `first` on, then
//                                         in as many words what high bits belong to them
//   values(words, high, side, v)          eight codes of two words, divided by factor()
//   factors(block, unit)                  scale and minus the minimum: weight = scale * code + it
#pragma once

#include <metal_stdlib>

#include "metal/common/unroll.h"
#include "metal/quantized_matmul/codes.h"

// True if w is aligned for the loads of its format. Otherwise bytes are loaded one by one.
constant bool blocks_are_aligned [[function_constant(6)]];

METAL_FUNC uint load_ushort(const device uchar* from) {
  return blocks_are_aligned ? uint(*reinterpret_cast<const device ushort*>(from))
                            : uint(from[0]) | uint(from[1]) << 8;
}

template <int kAlignment, int kWords>
METAL_FUNC void load_bytes(const device uchar* from, thread uint* words) {
  if (blocks_are_aligned && kAlignment >= 4) {
    enum { kMost = kAlignment / 4, kAtOnce = kMost < kWords ? kMost : kWords };
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWords; i += kAtOnce) {
      load_words<kAtOnce>(reinterpret_cast<const device uint*>(from) + i, true, words + i);
    }
    return;
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kWords; ++i) {
    words[i] = load_ushort(from + 4 * i) | load_ushort(from + 4 * i + 2) << 16;
  }
}

METAL_FUNC float half_of(uint bits) {
  return static_cast<float>(as_type<half2>(bits).x);
}

// Codes in the low nine bits of both halves of a word, minus kZero, which is exact.
template <int kZero>
METAL_FUNC void store_signed(uint bits, thread float& low, thread float& high) {
  const half2 pair = as_type<half2>(bits | 0x64006400u) - half2(1024.0h + half(kZero));
  low = static_cast<float>(pair.x);
  high = static_cast<float>(pair.y);
}

// ---- codes of 4 bits, and high bits from other bytes --------------------------------------------

// kHighBits of each code are in a word `high`: of the first side in the lowest bits of each byte,
// of the second kHighStep bits further up. `Store` converts two codes.
template <typename Store, int kHighBits, int kHighStep>
METAL_FUNC void store_nibbles(const thread uint* words,
                              const thread uint* high,
                              uint side,
                              thread float* v) {
  enum { kMask = 0x00010001 * ((1 << kHighBits) - 1) };
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int word = i / 2, byte = i % 2;
    uint bits = words[word] >> (4 * side + 8 * byte) & 0x000f000fu;
    if (kHighBits > 0) {
      bits |= (high[word] >> (kHighStep * side + 8 * byte) & uint(kMask)) << 4;
    }
    Store::store(bits, v[4 * word + byte], v[4 * word + byte + 2]);
  }
}

struct StoreUnsigned {
  METAL_FUNC static void store(uint bits, thread float& low, thread float& high) {
    store_halves(bits, low, high);
  }
};

template <int kZero>
struct StoreSigned {
  METAL_FUNC static void store(uint bits, thread float& low, thread float& high) {
    store_signed<kZero>(bits, low, high);
  }
};

// The 16 values of iq4_nl. This polynomial is less than 0.44 away from each; a table in memory
// would cost a load per code.
struct StoreNonlinear {
  METAL_FUNC static float value(float code) {  // divided by 2^24
    float sum = metal::fma(0.001586f * 0x1p96f, code, 0.031086f * 0x1p72f);
    sum = metal::fma(sum, code, -1.3719f * 0x1p48f);
    sum = metal::fma(sum, code, 24.174f * 0x1p24f);
    return metal::rint(metal::fma(sum, code, -126.57f));
  }
  METAL_FUNC static void store(uint bits, thread float& low, thread float& high) {
    store_halves(bits, low, high);
    low = value(low);
    high = value(high);
  }
};

// ---- formats with blocks of 32 columns ----------------------------------------------------------

// Half a scale, then 16 bytes: columns 0 to 15 in the low bits, the others in the high ones.
template <typename Store>
struct GgufNibbles {
  enum { kColumns = 32, kBytes = 18, kAlignment = 2, kSides = 2, kHasMins = 0, kHasHigh = 0 };
  METAL_FUNC static uint unit(uint, uint side) { return side; }
  METAL_FUNC static uint chunk(uint) { return 0; }
  METAL_FUNC static uint side(uint unit) { return unit; }

  template <int kWords>
  METAL_FUNC static void load(const device uchar* block, uint, uint first, thread uint* words) {
    load_bytes<kAlignment, kWords>(block + 2 + first, words);
  }
  METAL_FUNC static void values(const thread uint* words,
                                const thread uint* high,
                                uint side,
                                thread float* v) {
    store_nibbles<Store, 0, 0>(words, high, side, v);
  }
  METAL_FUNC static float factor() { return 1.0f; }
  METAL_FUNC static float2 factors(const device uchar* block, uint) {
    return float2(half_of(load_ushort(block)), 0.0f);
  }
};

using GgufQ4_0 = GgufNibbles<StoreSigned<8>>;
using GgufIq4Nl = GgufNibbles<StoreNonlinear>;

struct GgufQ8_0 {
  enum { kColumns = 32, kBytes = 34, kAlignment = 2, kSides = 1, kHasMins = 0, kHasHigh = 0 };
  METAL_FUNC static uint unit(uint chunk, uint) { return chunk; }
  METAL_FUNC static uint chunk(uint unit) { return unit; }
  METAL_FUNC static uint side(uint) { return 0; }

  template <int kWords>
  METAL_FUNC static void load(const device uchar* block,
                              uint chunk,
                              uint first,
                              thread uint* words) {
    load_bytes<kAlignment, kWords>(block + (2 + 16 * chunk + first), words);
  }
  METAL_FUNC static void values(const thread uint* words,
                                const thread uint*,
                                uint,
                                thread float* v) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int word = i / 2, byte = i % 2;
      const uint bits = (words[word] ^ 0x80808080u) >> (8 * byte) & 0x00ff00ffu;
      store_signed<128>(bits, v[4 * word + byte], v[4 * word + byte + 2]);
    }
  }
  METAL_FUNC static float factor() { return 1.0f; }
  METAL_FUNC static float2 factors(const device uchar* block, uint) {
    return float2(half_of(load_ushort(block)), 0.0f);
  }
};

// ---- formats with blocks of 256 columns ---------------------------------------------------------

// q4_K and q5_K: scales and minima of 6 bits for each 32 columns. Codes of 64 columns are in 32
// bytes, the first 32 columns in the low bits.
template <int kBits>
struct GgufWithMins {
  enum { kColumns = 256, kBytes = kBits == 4 ? 144 : 176, kAlignment = 16, kSides = 2 };
  enum { kHasMins = 1, kHasHigh = kBits == 5, kHeader = 16, kFirstCode = kBits == 4 ? 16 : 48 };
  METAL_FUNC static uint unit(uint chunk, uint side) {
    return chunk / 2 * 4 + 2 * side + chunk % 2;
  }
  METAL_FUNC static uint chunk(uint unit) { return unit / 4 * 2 + unit % 2; }
  METAL_FUNC static uint side(uint unit) { return unit / 2 % 2; }

  template <int kWords>
  METAL_FUNC static void load(const device uchar* block,
                              uint chunk,
                              uint first,
                              thread uint* words) {
    load_bytes<16, kWords>(block + (kFirstCode + 16 * chunk + first), words);
    if (kHasHigh) {  // bit s of a byte is of 32 columns from 32 s on
      load_bytes<16, kWords>(block + (kHeader + chunk % 2 * 16 + first), words + kWords);
      MLX_ANVIL_UNROLL
      for (int i = kWords; i < 2 * kWords; ++i) {
        words[i] >>= chunk / 2 * 2;
      }
    }
  }
  METAL_FUNC static void values(const thread uint* words,
                                const thread uint* high,
                                uint side,
                                thread float* v) {
    store_nibbles<StoreUnsigned, kHasHigh, 1>(words, high, side, v);
  }
  METAL_FUNC static float factor() { return 0x1p24f; }

  // Bytes 4 to 7: six bits of the first four scales, and bits 4 and 5 of the others. Bytes 8 to 11:
  // the same of the minima. Bytes 12 to 15: low bits of the other scales and minima.
  METAL_FUNC static float2 factors(const device uchar* block, uint unit) {
    uint header[4];
    load_bytes<16, 4>(block, header);
    const uint own = unit / 2, shift = 8 * (own % 4);
    const uint scales = header[1] >> shift, mins = header[2] >> shift, others = header[3] >> shift;
    const bool is_first = own < 4;
    const uint scale = is_first ? scales & 63 : (others & 15) | (scales >> 2 & 48);
    const uint min = is_first ? mins & 63 : (others >> 4 & 15) | (mins >> 2 & 48);
    return float2(half_of(header[0] & 0xffff) * static_cast<float>(scale),
                  -(half_of(header[0] >> 16) * static_cast<float>(min)));
  }
};

using GgufQ4K = GgufWithMins<4>;
using GgufQ5K = GgufWithMins<5>;

// 128 columns have 64 bytes of low bits and 32 of two high bits: byte i of the latter has the high
// bits of columns i, i + 32, i + 64 and i + 96.
struct GgufQ6K {
  enum { kColumns = 256, kBytes = 210, kAlignment = 2, kSides = 2, kHasMins = 0, kHasHigh = 1 };
  METAL_FUNC static uint unit(uint chunk, uint side) {
    return chunk / 4 * 8 + 4 * side + chunk % 4;
  }
  METAL_FUNC static uint chunk(uint unit) { return unit / 8 * 4 + unit % 4; }
  METAL_FUNC static uint side(uint unit) { return unit / 4 % 2; }

  template <int kWords>
  METAL_FUNC static void load(const device uchar* block,
                              uint chunk,
                              uint first,
                              thread uint* words) {
    load_bytes<kAlignment, kWords>(block + (16 * chunk + first), words);
    load_bytes<kAlignment, kWords>(block + (128 + chunk / 4 * 32 + chunk % 2 * 16 + first),
                                   words + kWords);
    MLX_ANVIL_UNROLL
    for (int i = kWords; i < 2 * kWords; ++i) {
      words[i] >>= chunk / 2 % 2 * 2;
    }
  }
  METAL_FUNC static void values(const thread uint* words,
                                const thread uint* high,
                                uint side,
                                thread float* v) {
    store_nibbles<StoreSigned<32>, 2, 4>(words, high, side, v);
  }
  METAL_FUNC static float factor() { return 1.0f; }
  METAL_FUNC static float2 factors(const device uchar* block, uint unit) {
    const float scale = static_cast<float>(static_cast<char>(block[192 + unit]));
    return float2(half_of(load_ushort(block + 208)) * scale, 0.0f);
  }
};

// iq4_nl with scales of 6 bits for each 32 columns.
struct GgufIq4Xs {
  enum { kColumns = 256, kBytes = 136, kAlignment = 8, kSides = 2, kHasMins = 0, kHasHigh = 0 };
  METAL_FUNC static uint unit(uint chunk, uint side) { return 2 * chunk + side; }
  METAL_FUNC static uint chunk(uint unit) { return unit / 2; }
  METAL_FUNC static uint side(uint unit) { return unit % 2; }

  template <int kWords>
  METAL_FUNC static void load(const device uchar* block,
                              uint chunk,
                              uint first,
                              thread uint* words) {
    load_bytes<kAlignment, kWords>(block + (8 + 16 * chunk + first), words);
  }
  METAL_FUNC static void values(const thread uint* words,
                                const thread uint* high,
                                uint side,
                                thread float* v) {
    store_nibbles<StoreNonlinear, 0, 0>(words, high, side, v);
  }
  METAL_FUNC static float factor() { return 1.0f; }
  METAL_FUNC static float2 factors(const device uchar* block, uint unit) {
    uint header[2];
    load_bytes<kAlignment, 2>(block, header);
    const uint own = unit / 2;
    const uint low = header[1] >> (4 * own) & 15, high = header[0] >> (16 + 2 * own) & 3;
    const float scale = static_cast<float>(int(low | high << 4) - 32);
    return float2(half_of(header[0] & 0xffff) * scale, 0.0f);
  }
};

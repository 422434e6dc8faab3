// Eight adjacent codes of a row of w to 16-bit weights, as four words of two adjacent weights each:
// what a lane multiplies on matrix units. Weights are rounded once.
//
//   GemmCodes<kBits>::pairs(words, pairs)   codes as integers in the halves of words
//   GemmFactors<T, Format>                  scale and bias of a group
//   gemm_weights(words, factors, magic, w)  `magic` is GemmMagic<T>::kBits, in a register
#pragma once

#include "metal/common/pairs.h"
#include "metal/quantized_matmul/codes.h"

// Pieces of eight codes, from the lowest bit on. A piece may be part of a vector, `vector_of` of
// which it is; otherwise it is loaded from the start of its 16 pieces.
template <int kBits>
struct GemmPiece {
  enum { kIsPart = (kBits & (kBits - 1)) == 0 };

  METAL_FUNC static uint vector_of(uint piece) { return kIsPart ? piece * kBits / 16 : 0; }

  METAL_FUNC static uint2 load(const threadgroup uint4* from, uint piece) {
    if (kBits == 4) {
      return uint2(reinterpret_cast<const threadgroup uint*>(from)[piece % 4], 0);
    }
    if (kBits == 8) {
      return reinterpret_cast<const threadgroup uint2*>(from)[piece % 2];
    }
    if (kBits == 2) {
      return uint2(reinterpret_cast<const threadgroup ushort*>(from)[piece % 8], 0);
    }
    // kBits bytes, which may start inside a word. The last piece does not reach another word.
    const uint byte = kBits * piece, shift = byte % 4 * 8, last = 4 * kBits - 1;
    const threadgroup uint* const at = reinterpret_cast<const threadgroup uint*>(from);
    const uint low = at[byte / 4], high = at[metal::min(byte / 4 + 1, last)];
    return uint2(low >> shift | high << 1 << (31 - shift), high >> shift);
  }
};

template <int kBits>
struct GemmCodes {
  METAL_FUNC static void pairs(uint2 words, thread uint* pairs) {
    const uint both[2] = {words.x, words.y};
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      pairs[i] = code_at<kBits>(both, 2 * i) | code_at<kBits>(both, 2 * i + 1) << 16;
    }
  }
};

template <>
struct GemmCodes<2> {
  METAL_FUNC static void pairs(uint2 words, thread uint* pairs) {
    const uint spread = (words.x & 0xffffu) | (words.x & 0xffffu) << 14;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      pairs[i] = spread >> (4 * i) & 0x00030003u;
    }
  }
};

template <>
struct GemmCodes<4> {
  METAL_FUNC static void pairs(uint2 words, thread uint* pairs) {
    const ushort2 even = as_type<ushort2>(words.x), odd = as_type<ushort2>(words.x >> 4);
    const uint spread[2] = {as_type<uint>(ushort2(even.x, odd.x)),
                            as_type<uint>(ushort2(even.y, odd.y))};
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      pairs[i] = spread[i / 2] >> (8 * (i % 2)) & 0x000f000fu;
    }
  }
};

template <>
struct GemmCodes<8> {
  METAL_FUNC static void pairs(uint2 words, thread uint* pairs) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uchar4 codes = as_type<uchar4>(words[i / 2]);
      pairs[i] = as_type<uint>(ushort2(codes[i % 2 * 2], codes[i % 2 * 2 + 1]));
    }
  }
};

// OR-ing kBits to codes of kExactBits gives offset() more than the codes.
template <typename T>
struct GemmMagic;

template <>
struct GemmMagic<half> {
  enum { kBits = 0x64006400, kExactBits = 10 };
  METAL_FUNC static half offset() { return half(1024.0f); }
};

template <>
struct GemmMagic<bfloat> {
  enum { kBits = 0x43004300, kExactBits = 7 };
  METAL_FUNC static bfloat offset() { return bfloat(128.0f); }
};

// Of affine formats: both elements of a pair are the same.
template <typename T, typename Format>
struct GemmFactors {
  enum { kArrays = 2 };
  uint scale, bias;
  METAL_FUNC void read(const threadgroup T* scale_at, int biases_after) thread {
    scale = pair_of(scale_at[0]);
    bias = pair_of(scale_at[biases_after]);
  }
  // Number `index` of up to four.
  METAL_FUNC void take(uint2 scales, uint2 biases, uint index) thread {
    const uint which = 0x1010 + 0x2222 * index;
    scale = select_bytes(scales.x, scales.y, which);
    bias = select_bytes(biases.x, biases.y, which);
  }
  METAL_FUNC void clear() thread { scale = bias = 0; }
};

// Of formats without biases: a weight is a small float times its scale. Scales of float16 weights
// may be outside its range; only those of nvfp4 never are.
template <typename T, typename Format>
struct GemmScale {
  enum { kArrays = 1 };
  float scale;
  METAL_FUNC void read(const threadgroup uchar* scale_at, int) thread {
    scale = Format::scale(scale_at[0]);
  }
  // Number `index` of up to eight.
  METAL_FUNC void take(uint2 scales, uint2, uint index) thread {
    scale = Format::scale(static_cast<uchar>(select_bytes(scales.x, scales.y, index)));
  }
  METAL_FUNC void clear() thread { scale = 0.0f; }

  // `values` times 2^exponent times the scale.
  METAL_FUNC uint weights(uint values, float power) const thread {
    using Two = metal::vec<T, 2>;
    if (metal::is_same_v<T, bfloat> || metal::is_same_v<Format, Nvfp4Format>) {
      return multiply_pairs<T>(multiply_pairs<T>(values, pair_of(static_cast<T>(power))),
                               pair_of(static_cast<T>(scale)));
    }
    const float2 exact = scale * (power * float2(as_type<Two>(values)));
    return as_type<uint>(Two(static_cast<T>(exact.x), static_cast<T>(exact.y)));
  }
};

template <typename T>
struct GemmFactors<T, Mxfp4Format> : GemmScale<T, Mxfp4Format> {};
template <typename T>
struct GemmFactors<T, Nvfp4Format> : GemmScale<T, Nvfp4Format> {};
template <typename T>
struct GemmFactors<T, Mxfp8Format> : GemmScale<T, Mxfp8Format> {};

// Four pairs of codes to weights, in place.
template <typename T, int kBits>
METAL_FUNC void scale_codes(GemmFactors<T, AffineFormat<kBits>> by,
                            uint magic,
                            thread uint* weights) {
  const uint one = pair_of(static_cast<T>(1.0f)), offset = pair_of(-GemmMagic<T>::offset());
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint code = weights[i], added = offset;
    if (int(kBits) > int(GemmMagic<T>::kExactBits)) {
      // bfloat16 and 8 bits: the top bit of a code is as much as the offset.
      added = ((~code & 0x00800080u) >> 7) * (offset & 0xffffu);
      code &= 0x007f007fu;
    }
    weights[i] = fma_pairs<T>(fma_pairs<T>(code | magic, one, added), by.scale, by.bias);
  }
}

// Codes moved into the fields of a T are the values times 2^-(bias of T - bias of the code).
template <typename T, typename Format>
METAL_FUNC void scale_e2m1_codes(GemmScale<T, Format> by, thread uint* weights) {
  enum { kShift = metal::is_same_v<T, half> ? 9 : 6 };
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint code = weights[i];
    weights[i] = by.weights((code & 0x00070007u) << kShift | (code & 0x00080008u) << 12,
                            kShift == 9 ? 0x1p14f : 0x1p126f);
  }
}

template <typename T>
METAL_FUNC void scale_codes(GemmFactors<T, Mxfp4Format> by, uint, thread uint* weights) {
  scale_e2m1_codes<T, Mxfp4Format>(by, weights);
}

template <typename T>
METAL_FUNC void scale_codes(GemmFactors<T, Nvfp4Format> by, uint, thread uint* weights) {
  scale_e2m1_codes<T, Nvfp4Format>(by, weights);
}

// Without the NaN codes.
template <typename T>
METAL_FUNC void scale_codes(GemmFactors<T, Mxfp8Format> by, uint, thread uint* weights) {
  enum { kShift = metal::is_same_v<T, half> ? 7 : 4 };
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint code = weights[i];
    weights[i] = by.weights((code & 0x007f007fu) << kShift | (code & 0x00800080u) << 8,
                            kShift == 7 ? 0x1p8f : 0x1p120f);
  }
}

// Makes the scale of words with a NaN code NaN: every product with a NaN is one.
template <int kWords, typename Factors>
METAL_FUNC void see_nan(const thread uint (&)[kWords], thread Factors&) {}
template <int kWords, typename T>
METAL_FUNC void see_nan(const thread uint (&words)[kWords],
                        thread GemmFactors<T, Mxfp8Format>& by) {
  if (Mxfp8Format::has_nan<kWords>(words)) {
    by.scale = NAN;
  }
}

template <typename T, typename Format>
METAL_FUNC void gemm_weights(uint2 words,
                             GemmFactors<T, Format> by,
                             uint magic,
                             thread uint* weights) {
  const uint two[2] = {words.x, words.y};
  see_nan(two, by);
  GemmCodes<Format::kBits>::pairs(words, weights);
  scale_codes<T>(by, magic, weights);
}

// Weights as fragments of a matrix product, dequantised in registers. They pass through no
// threadgroup memory, so each weight costs its unpacking and one multiply-add, and stays float32.
//
// Eight adjacent codes (a piece) make four fragments: fragment j has codes j and j + 4, which one
// mask extracts, as elements 0 and 1 of the lane that holds the piece. A fragment's other
// dimension, or that of the product, then has its columns in this order:
//   element e of fragment j of a piece: column 4 e + j of the piece
#pragma once

#include "metal/common/tile.h"
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/params.h"

// True if the summed dimension is a multiple of a kernel's step, so that no step is incomplete.
constant bool steps_are_whole [[function_constant(5)]];

// kCodes codes of a row of w, which share a scale.
template <typename T, typename Format, int kCodes>
struct LaneWeights {
  enum { kWords = (kCodes * Format::kBits + 31) / 32, kPieces = kCodes / 8 };
  static_assert(int(kCodes) <= int(Format::kPart), "one scale");
  uint words[kWords];
  float scale, bias;

  // Loads the codes from `column` on. If they do not exist, the weights are zeros.
  METAL_FUNC void load(WeightRow<T, Format> row,
                       int column,
                       bool exists,
                       constant QuantizedParams& params) thread {
    const int at = exists ? column : 0;
    load_codes<Format, kCodes>(row, at, params.columns, words);
    const float2 factors = scale_and_bias(row, at >> params.group_shift);
    scale = exists ? factors.x : 0.0f;
    bias = exists ? factors.y : 0.0f;
    if (Format::kBits >= 8 && !Format::kHasBiases) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kWords; ++i) {
        words[i] = exists ? words[i] : 0;  // no NaN codes
      }
    }
  }

  // A weight that overflows because of factor() makes its sums infinite or NaN, and those are
  // computed again (large_numbers.h). half has no such scales, and formats without biases do not
  // rely on it.
  METAL_FUNC void weights(int piece, thread float (&v)[8]) const thread {
    values_or_nan<Format>(words, piece, v);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      v[i] = Format::kHasBiases ? metal::fma(v[i], Format::factor() * scale, bias)
                                : Format::factor() * v[i] * scale;
    }
  }
};

// Adds the product of fragments of weights with fragments of x.
template <typename T>
METAL_FUNC void add_product(thread Fragment<float>& sum, float2 weights, Pair<T> x) {
  metal::simdgroup_multiply_accumulate(sum, fragment_of<float>(weights.x, weights.y),
                                       fragment_of<T>(x.x, x.y), sum);
}

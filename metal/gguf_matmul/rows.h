// Rows of GGUF's blocks as the kernels of quantized matrices see rows of w: what dequant.h and
// lane_weights.h define for other formats.
#pragma once

#include "metal/gguf_matmul/codes.h"
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/lane_weights.h"

template <typename Codes>
struct GgufFormat : Codes {
  enum { kChunk = 16, kPart = 16 };  // a unit
  enum { kHasBiases = Codes::kHasMins };
};

template <typename T, typename Codes>
struct WeightRow<T, GgufFormat<Codes>> {
  const device uchar* blocks;
  uint first_byte;

  METAL_FUNC const device uchar* block(uint index) const thread {
    return blocks + (first_byte + index * Codes::kBytes);
  }
};

template <typename Codes>
METAL_FUNC uint bytes_per_row(int columns) {
  return uint(columns) / Codes::kColumns * Codes::kBytes;
}

template <typename T, typename Codes>
METAL_FUNC WeightRow<T, GgufFormat<Codes>> weight_row(WeightRow<T, GgufFormat<Codes>> first,
                                                      long row,
                                                      int columns,
                                                      int) {
  return {first.blocks + row * bytes_per_row<Codes>(columns), 0};
}

template <typename T, typename Codes>
METAL_FUNC WeightRow<T, GgufFormat<Codes>> row_of_tile(WeightRow<T, GgufFormat<Codes>> first,
                                                       uint row,
                                                       int columns,
                                                       int) {
  first.first_byte += row * bytes_per_row<Codes>(columns);
  return first;
}

// 8 or 16 codes of a unit.
template <typename T, typename Codes, int kCodes>
struct LaneWeights<T, GgufFormat<Codes>, kCodes> {
  enum { kWords = kCodes / 4, kPieces = kCodes / 8 };
  uint words[kWords * (1 + Codes::kHasHigh)];
  uint side;
  float scale, bias;

  // Loads the codes from `column` on. If they do not exist, the weights are zeros.
  METAL_FUNC void load(WeightRow<T, GgufFormat<Codes>> row,
                       int column,
                       bool exists,
                       constant QuantizedParams&) thread {
    load(row, exists ? column : 0);
    scale = exists ? scale : 0.0f;
    bias = exists ? bias : 0.0f;
  }

  METAL_FUNC void load(WeightRow<T, GgufFormat<Codes>> row, int column) thread {
    const uint at = column, unit = at % Codes::kColumns / 16;
    const device uchar* block = row.block(at / Codes::kColumns);
    side = Codes::side(unit);
    Codes::template load<kWords>(block, Codes::chunk(unit), kCodes == 8 ? at % 16 : 0, words);
    const float2 factors = Codes::factors(block, unit);
    scale = factors.x;
    bias = factors.y;
  }

  // Eight codes, divided by Codes::factor(). Weights are scale * codes + bias.
  METAL_FUNC void codes(int piece, thread float* v) const thread {
    Codes::values(words + 2 * piece, words + 2 * piece + kWords * Codes::kHasHigh, side, v);
  }

  // The bits are those of separate products and a sum: products of codes and scales are exact.
  METAL_FUNC void weights(int piece, thread float (&v)[8]) const thread {
    codes(piece, v);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float factor = Codes::factor() * scale;
      v[i] = Codes::kHasMins ? metal::fma(v[i], factor, bias) : v[i] * factor;
    }
  }
};

// Loads the eight weights from `column` on, a multiple of eight.
template <typename T, typename Codes, typename Params>
METAL_FUNC void load_weights(WeightRow<T, GgufFormat<Codes>> row,
                             int column,
                             constant Params&,
                             thread float* weights) {
  LaneWeights<T, GgufFormat<Codes>, 8> own;
  own.load(row, column);
  float v[8];
  own.weights(0, v);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 8; ++i) {
    weights[i] = v[i];
  }
}

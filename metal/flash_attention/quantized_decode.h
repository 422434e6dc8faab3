// The part of a decode over quantized keys and values that one simdgroup computes.
#pragma once

#include "metal/flash_attention/decode.h"
#include "metal/flash_attention/quantized.h"

// What queries are kept as: Apple's GPUs multiply halves as they are.
template <typename T>
struct KeptQuery {
  using Type = float;
};
template <>
struct KeptQuery<half> {
  using Type = half;
};

// Rows of queries, and blocks of keys as in DecodeLanes. A lane has the same columns of a value as
// of its key, and of the keys of its slot only, so that one load has many codes that share a scale.
// In the end, the lanes that have the same columns add up what they have of the output.
//
// Scale and bias apply to sums: q . (scale c + bias) = scale (q . c) + bias sum(q), where c are the
// codes of a lane, and likewise for values. Codes count multiples of factor() until the end.
template <typename T, int kDim, int kRows, int kSteps, int kElements>
struct QuantizedRows {
  using Lanes = DecodeLanes<kDim, kRows, kSteps, kElements>;
  using Output = DecodeOutput<kDim, kRows>;
  using Keys = CodeChunk<T, kOfKeys, kElements>;
  using Values = CodeChunk<T, kOfValues, kElements>;
  enum { kPieces = kElements / 8 };

  Lanes lanes;
  typename KeptQuery<T>::Type q[kRows][kElements];
  float q_sums[kRows];  // over the lane's columns, divided by factor()
  float out[kRows][kElements];
  float biases[kRows];    // to be added to all columns
  OnlineSoftmax softmax;  // of the lane's row; the sum is of the lane's own scores

  METAL_FUNC void begin(uint lane) thread {
    lanes.lane = lane;
    softmax.clear();
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kRows; ++r) {
      biases[r] = 0.0f;
      MLX_ANVIL_UNROLL
      for (int e = 0; e < kElements; ++e) {
        out[r][e] = 0.0f;
      }
    }
  }

  // `row` is a row of q.
  METAL_FUNC void load_query(int r, Rows<T> row) thread {
    T loaded[kElements];
    load_columns<T, kElements>(row, 0, lanes.first_column(), true, loaded);
    float sum = 0.0f;
    MLX_ANVIL_UNROLL
    for (int e = 0; e < kElements; ++e) {
      q[r][e] = static_cast<typename KeptQuery<T>::Type>(loaded[e]);
      sum += static_cast<float>(loaded[e]);
    }
    q_sums[r] = sum / Keys::factor();
  }

  // Returns q . k of the lane's row and key.
  METAL_FUNC float multiply_keys(const thread Keys (&keys)[kSteps], int bits) const thread {
    float sums[Lanes::kScores];
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kSteps; ++t) {
      float dots[kRows];
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kRows; ++r) {
        dots[r] = 0.0f;
      }
      MLX_ANVIL_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        float v[8];
        keys[t].values(piece, bits, v);
        MLX_ANVIL_UNROLL
        for (int r = 0; r < kRows; ++r) {
          MLX_ANVIL_UNROLL
          for (int i = 0; i < 8; ++i) {
            dots[r] = metal::fma(static_cast<float>(q[r][8 * piece + i]), v[i], dots[r]);
          }
        }
      }
      const float scale = keys[t].has_nan() ? NAN : keys[t].scale;
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float of_bias = codes_are_floats ? 0.0f : keys[t].bias * q_sums[r];
        sums[t * kRows + r] = metal::fma(dots[r], scale, of_bias);
      }
    }
    return lanes.exchange(sums) * Keys::factor();
  }

  // Adds a block. A key that the row does not see has a score of -inf.
  METAL_FUNC void add(float score, const thread Values (&values)[kSteps], int bits) thread {
    const float factor = softmax.begin_piece(lanes.max_over_keys(score));
    const float weight = metal::fast::exp2(score - softmax.base());
    softmax.sum += weight;
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float of_row = metal::simd_broadcast(factor, ushort(r));
      biases[r] *= of_row;
      MLX_ANVIL_UNROLL
      for (int e = 0; e < kElements; ++e) {
        out[r][e] *= of_row;
      }
    }
    float weights[Lanes::kScores];
    lanes.spread(weight, weights);
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kSteps; ++t) {
      float scaled[kRows];
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float of_key = weights[t * kRows + r];
        scaled[r] = of_key * values[t].scale;
        biases[r] = codes_are_floats ? 0.0f : metal::fma(of_key, values[t].bias, biases[r]);
      }
      MLX_ANVIL_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        float v[8];
        values[t].values_or_nan(piece, bits, v);
        MLX_ANVIL_UNROLL
        for (int r = 0; r < kRows; ++r) {
          MLX_ANVIL_UNROLL
          for (int i = 0; i < 8; ++i) {
            out[r][8 * piece + i] = metal::fma(scaled[r], v[i], out[r][8 * piece + i]);
          }
        }
      }
    }
  }

  // Returns the lane's columns of the output, of all keys of the simdgroup. Lanes whose numbers
  // differ in one bit of the slot give each other half of their columns.
  METAL_FUNC Output merged() thread {
    Output all;
    all.first_column = lanes.first_column() + lanes.slot() * Output::kOwn;
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kRows; ++r) {
      MLX_ANVIL_UNROLL
      for (int distance = 16; distance >= Lanes::kLanes; distance /= 2) {
        const bool upper = lanes.lane & distance;
        const int half_of = kElements * distance / 32;
        MLX_ANVIL_UNROLL
        for (int e = 0; e < half_of; ++e) {
          const float kept = upper ? out[r][e + half_of] : out[r][e];
          const float given = upper ? out[r][e] : out[r][e + half_of];
          out[r][e] = kept + metal::simd_shuffle_xor(given, ushort(distance));
        }
      }
      const float bias = over_lanes<false, Lanes::kLanes>(biases[r]);
      MLX_ANVIL_UNROLL
      for (int e = 0; e < Output::kOwn; ++e) {
        all.columns[r][e] = metal::fma(out[r][e], Values::factor(), bias);
      }
    }
    return all;
  }
};

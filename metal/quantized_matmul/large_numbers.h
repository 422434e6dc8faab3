// Products of x near the largest float32. The kernels add up codes times x before they multiply by
// the scale. Such a sum can overflow where the result does not. Then the total is infinite or NaN,
// and its thread computes it again: weights times x in units of 2^64. Other totals cost one
// comparison. The second computation is slow, but rarely needed.
#pragma once

#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/params.h"

// Whether sums of codes times x may overflow.
template <typename T>
struct SumsOverflow {
  enum { kMay = true };
};

template <>
struct SumsOverflow<half> {
  enum { kMay = false };
};

// Compares bits, which fast math does not optimise away.
template <typename T>
METAL_FUNC bool has_overflowed(float total) {
  return SumsOverflow<T>::kMay && (as_type<uint>(total) & 0x7f800000u) == 0x7f800000u;
}

METAL_FUNC bool is_nan(float total) {
  return (as_type<uint>(total) & 0x7fffffffu) > 0x7f800000u;
}

// Returns a zero that the compiler cannot fold. What is computed anew with it need not stay in
// registers since it was computed first. Call with the whole simdgroup.
METAL_FUNC uint unknown_zero(uint lane) {
  return metal::simd_broadcast(lane, ushort(0));
}

METAL_FUNC float in_units(float x) {
  return 0x1p-64f * x;
}
METAL_FUNC float of_units(float sum) {
  return 0x1p64f * sum;
}

// Returns the product of a row of w and the row of x that starts at element `first_x`.
template <typename T, typename Format>
METAL_FUNC float product_in_units(WeightRow<T, Format> row,
                                  const device T* x,
                                  constant QuantizedParams& params,
                                  uint first_x = 0) {
  float sum = 0.0f;
  MLX_ANVIL_NO_UNROLL
  for (int column = 0; column < params.columns && !is_nan(sum); column += 8) {
    float weights[8];
    load_weights(row, column, params, weights);
    float of_piece = 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {
      of_piece = metal::fma(weights[i], in_units(static_cast<float>(x[first_x + uint(column + i)])),
                            of_piece);
    }
    sum += of_piece;
  }
  return of_units(sum);
}

// Returns weight `column` of a row of w.
template <typename T, typename Format>
METAL_FUNC float weight_at(WeightRow<T, Format> row, int column, constant QuantizedParams& params) {
  float weights[8];
  load_weights(row, column & ~7, params, weights);
  float weight = weights[0];
  MLX_ANVIL_UNROLL
  for (int i = 1; i < 8; ++i) {
    weight = (column & 7) == i ? weights[i] : weight;
  }
  return weight;
}

// Returns the product of a column of w, rows [begin, end), and a row of x. `first_row` is the
// matrix's first row, over all batches.
template <typename T, typename Format>
METAL_FUNC float plain_product_in_units(WeightRow<T, Format> first,
                                        long first_row,
                                        int begin,
                                        int end,
                                        int column,
                                        const device T* x,
                                        constant QuantizedParams& params) {
  float sum = 0.0f;
  MLX_ANVIL_NO_UNROLL
  for (int n = begin; n < end && !is_nan(sum); ++n) {
    const float weight = weight_at(
        weight_row(first, first_row + n, params.columns, params.group_shift), column, params);
    sum = metal::fma(weight, in_units(static_cast<float>(x[n])), sum);
  }
  return of_units(sum);
}

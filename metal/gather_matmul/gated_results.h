// Results of gated products: activation(g) * u, with the vectors that experts add to g and u.
#pragma once

#include "metal/common/activation.h"
#include "metal/quantized_matmul/tile_loops.h"

// True if experts have such vectors.
constant bool gates_have_vectors [[function_constant(9)]];
constant bool ups_have_vectors [[function_constant(10)]];

template <typename T>
struct AddedVectors {
  const device T* gate;
  const device T* up;
  ulong first;  // element of the expert

  METAL_FUNC AddedVectors of_expert(uint expert, constant QuantizedParams& params) const thread {
    return {gate, up, ulong(expert) * uint(params.outputs)};
  }

  METAL_FUNC float gated(float g,
                         float u,
                         int output,
                         constant QuantizedParams& params) const thread {
    if (gates_have_vectors) {
      g += static_cast<float>(gate[first + uint(output)]);
    }
    if (ups_have_vectors) {
      u += static_cast<float>(up[first + uint(output)]);
    }
    return gated_value(params.activation, params.limit, g, u);
  }
};

// Stores a lane's results for rows `row` and `row` + 1 of x, where they exist. Returns a bit for
// each that has overflowed.
template <typename T, typename Format>
METAL_FUNC uint store_gated(TiledProduct<T, Format> gate,
                            AddedVectors<T> added,
                            int row,
                            int output,
                            float2 of_gate,
                            float2 of_up,
                            constant QuantizedParams& params) {
  uint overflowed = 0;
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    if (row + e < gate.rows && output < params.outputs) {
      gate.out[uint(row + e) * uint(params.outputs) + uint(output)] =
          static_cast<T>(added.gated(of_gate[e], of_up[e], output, params));
      overflowed |= has_overflowed<T>(of_gate[e]) || has_overflowed<T>(of_up[e]) ? 1u << e : 0;
    }
  }
  return overflowed;
}

// Where a lane has pairs of results: pair i, from `row_step` * i rows and `output_step` * i outputs
// on.
struct GatedPlace {
  int row, output;
  int row_step, output_step;
};

// Computes the results again whose bits are set: bit 2 i + e is row e of pair i. Those are rare, so
// the loop has one product, and its arguments are computed with unknown_zero. The matrices start at
// their first words.
template <typename T, typename Format>
METAL_FUNC void keep_gated_in_range(TiledProduct<T, Format> gate,
                                    TiledProduct<T, Format> up,
                                    AddedVectors<T> added,
                                    GatedPlace place,
                                    uint overflowed,
                                    constant QuantizedParams& params) {
  MLX_ANVIL_NO_UNROLL
  for (; overflowed != 0; overflowed &= overflowed - 1) {
    const int i = metal::ctz(overflowed);
    const int row = place.row + i / 2 * place.row_step + i % 2;
    const int output = place.output + i / 2 * place.output_step;
    float g = 0.0f, u = 0.0f;
    MLX_ANVIL_NO_UNROLL
    for (int which = 0; which < 2; ++which) {
      // Chosen one by one, pointers stay in registers.
      const WeightRow<T, Format> first = {which == 0 ? gate.first.words : up.first.words,
                                          which == 0 ? gate.first.scales : up.first.scales,
                                          which == 0 ? gate.first.biases : up.first.biases, 0, 0};
      const TiledProduct<T, Format> product = {gate.x, first, gate.out, 0, gate.rows};
      g = u;
      u = product_in_units(product.row_of_w(output, params), gate.x, params,
                           uint(row) * uint(params.columns));
    }
    gate.out[uint(row) * uint(params.outputs) + uint(output)] =
        static_cast<T>(added.gated(g, u, output, params));
  }
}

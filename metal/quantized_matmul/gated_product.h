// What products with one matrix, or with gate and up, store.
#pragma once

#include "metal/common/activation.h"
#include "metal/quantized_matmul/params.h"

// Gates to which nothing is added.
struct NothingAdded {
  METAL_FUNC NothingAdded of_expert(uint, constant QuantizedParams&) const thread { return {}; }
  METAL_FUNC float gated(float g, float u, int, constant QuantizedParams& params) const thread {
    return gated_value(params.activation, params.limit, g, u);
  }
};

// Of products with one matrix: the product. Of two, gate and up: activation(gate) * up.
template <int kMatrices, typename Added>
METAL_FUNC float result_of(
    float first, float last, int output, Added added, constant QuantizedParams& params) {
  return kMatrices == 1 ? first : added.gated(first, last, output, params);
}

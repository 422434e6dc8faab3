// Ops on quantized matrices inside graphs that mx.compile(shapeless=True) traces.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "common/shapeless.h"
#include "quantized_matmul/compose.h"

namespace mlx_anvil {

inline bool traces_shapeless(const mx::array& x,
                             std::initializer_list<const QuantizedMatrix*> matrices) {
  return std::any_of(matrices.begin(), matrices.end(), [&x](const QuantizedMatrix* matrix) {
    return traces_shapeless(
        {&x, &matrix->w, &matrix->scales, matrix->biases ? &*matrix->biases : nullptr});
  });
}

// Builds the graph node of an op. `call` is the op as a function of x (or ids) and its matrices.
template <class Call>
Arrays shapeless_node(const char* op,
                      mx::Stream s,
                      const mx::array& x,
                      std::initializer_list<const QuantizedMatrix*> matrices,
                      Call call) {
  Arrays inputs = {x};
  std::vector<bool> have_biases;
  for (const QuantizedMatrix* matrix : matrices) {
    inputs.push_back(matrix->w);
    inputs.push_back(matrix->scales);
    OptionalInputs::append(inputs, matrix->biases);
    have_biases.push_back(matrix->biases.has_value());
  }
  return shapeless_node(op, s, std::move(inputs), [have_biases, call](const Arrays& in) {
    std::vector<QuantizedMatrix> own;
    size_t at = 1;
    for (const bool has_biases : have_biases) {
      own.push_back(
          {in[at], in[at + 1], has_biases ? std::optional<mx::array>(in[at + 2]) : std::nullopt});
      at += 2 + has_biases;
    }
    return call(in[0], std::move(own));
  });
}

}  // namespace mlx_anvil

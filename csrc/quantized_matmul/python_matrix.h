// Python's arguments for quantized matrices, shared by the ops that take one.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "quantized_matmul/checks.h"

namespace mlx_anvil {

namespace nb = nanobind;

QuantizedOptions to_quantized_options(const char* op,
                                      nb::handle group_size,
                                      nb::handle bits,
                                      nb::handle mode);

// `prefix` comes before the names of the arrays: "gate " for those of a pair.
QuantizedMatrix to_quantized_matrix(
    const char* op, const char* prefix, nb::handle w, nb::handle scales, nb::handle biases);

// The end of a signature.
#define MLX_ANVIL_QUANTIZED_FORMAT                           \
  "group_size: int | None = None, bits: int | None = None, " \
  "mode: str = 'affine', "

}  // namespace mlx_anvil

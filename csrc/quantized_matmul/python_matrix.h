// Converts Python arguments of quantized matrices, for the ops that take one.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "quantized_matmul/checks.h"

namespace mlx_anvil {

namespace nb = nanobind;

// `prefix` precedes the names of the options in errors.
QuantizedOptions to_quantized_options(const char* op,
                                      nb::handle group_size,
                                      nb::handle bits,
                                      nb::handle mode,
                                      const char* prefix = "");

// The same for an op that takes `activation_bits`.
QuantizedOptions to_quantized_options(const char* op,
                                      nb::handle group_size,
                                      nb::handle bits,
                                      nb::handle mode,
                                      nb::handle activation_bits);

// `prefix` precedes array names in errors, such as "gate " in swiglu.
QuantizedMatrix to_quantized_matrix(
    const char* op, const char* prefix, nb::handle w, nb::handle scales, nb::handle biases);

// (w, scales) or (w, scales, biases). `argument` precedes array names in errors.
QuantizedMatrix to_quantized_tuple(const char* op, const char* argument, nb::handle parts);

// Returns true for the parts of a quantized matrix. Other sequences are errors of plain arrays.
bool is_quantized_tuple(nb::handle value);

// The formats of keys and values: `kv_group_size`, `kv_bits`, `kv_mode`. One number of bits serves
// both.
std::pair<QuantizedOptions, QuantizedOptions> to_kv_options(const char* op,
                                                            nb::handle group_size,
                                                            nb::handle bits,
                                                            nb::handle mode);

// Plain keys and values, the arguments `names`, leave the format at its defaults.
void require_no_kv_options(const char* op, const QuantizedOptions& options, const char* names);

// The tail of a signature.
#define MLX_ANVIL_QUANTIZED_FORMAT                           \
  "group_size: int | None = None, bits: int | None = None, " \
  "mode: str = 'affine', "
#define MLX_ANVIL_ACTIVATION_BITS "activation_bits: int | None = None, "

}  // namespace mlx_anvil

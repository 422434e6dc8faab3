// Python arguments of ops in the modes of GGUF's formats.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "gguf_matmul/gguf_matmul.h"

namespace mlx_anvil {

namespace nb = nanobind;

// Returns nothing for the other modes. Throws if group_size or bits are given, which the formats
// fix.
std::optional<GgufOptions> to_gguf_options(const char* op,
                                           nb::handle group_size,
                                           nb::handle bits,
                                           nb::handle mode,
                                           nb::handle activation_bits = nb::none());

// Returns w. Throws if scales or biases are given. `prefix` precedes array names in errors.
const mx::array& to_gguf_matrix(
    const char* op, const char* prefix, nb::handle w, nb::handle scales, nb::handle biases);

// Returns w of (w,) or (w, None). `argument` precedes array names in errors.
mx::array to_gguf_tuple(const char* op, const char* argument, nb::handle parts);

}  // namespace mlx_anvil

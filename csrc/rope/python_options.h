// Converts Python arguments of a rotation, for the ops that rotate.
#pragma once

#include <nanobind/nanobind.h>

#include "rope/rope.h"

namespace mlx_anvil {

namespace nb = nanobind;

RopeOptions to_rope_options(const char* op,
                            nb::handle dims,
                            nb::handle traditional,
                            nb::handle base,
                            nb::handle scale,
                            nb::handle offset,
                            nb::handle freqs);

}  // namespace mlx_anvil

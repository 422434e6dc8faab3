// The Python functions of the ops on quantized matrices.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

void bind_quantized_matmul(nanobind::module_& m);

}  // namespace mlx_anvil

// The Python function quantized_embedding.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

void bind_quantized_embedding(nanobind::module_& m);

}  // namespace mlx_anvil

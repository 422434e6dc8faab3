// The Python functions rms_norm and layer_norm.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

void bind_norm(nanobind::module_& m);

}  // namespace mlx_anvil

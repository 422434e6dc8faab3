// Bindings of the choices that `python -m mlx_anvil tune` measures.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

void bind_tuning(nanobind::module_& m);

}  // namespace mlx_anvil

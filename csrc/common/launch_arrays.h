// What dispatches ask of arrays before a launch.
#pragma once

#include <initializer_list>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// As in the names of kernels: "float32", "float16" or "bfloat16".
const char* dtype_name(const mx::array& x);

// Whether every row of each is a run of whole, aligned vectors of so many bytes.
bool rows_are_vectors(std::initializer_list<const mx::array*> arrays, int vector_bytes = 16);

}  // namespace mlx_anvil

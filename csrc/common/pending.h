// Tells which op of MLX an array is the result of, as long as no evaluation has reached it.
#pragma once

#include <string_view>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// `primitive` is MLX's name, such as "Add": MLX does not export the type of every primitive.
inline bool is_pending(const mx::array& x, std::string_view primitive) {
  return x.has_primitive() && x.status() == mx::array::Status::unscheduled &&
         x.primitive().name() == primitive;
}

}  // namespace mlx_anvil

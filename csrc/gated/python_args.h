// Python arguments of ops with an activation.
#pragma once

#include <optional>

#include "common/python_args.h"
#include "gated/gated.h"

namespace mlx_anvil {

Activation to_activation(const char* op, nb::handle value);

// Accepts None. The op checks the value.
std::optional<float> to_limit(const char* op, nb::handle value);

}  // namespace mlx_anvil

// Facts about a GPU that select kernels, tiles and grids. The backend fills them in; the ops' GPU
// launches read them.
#pragma once

#include <cstdint>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

struct DeviceTraits {
  // Matrix units for 16-bit operands, which are many times faster than the other arithmetic.
  bool matrix_units = false;

  // The other traits are set only if there are matrix units.
  int64_t multiprocessors = 0;
  int64_t threadgroup_memory = 0;  // bytes per multiprocessor, for its resident threadgroups

  bool is_nvidia() const { return multiprocessors > 0; }
};

// An H100 or H200. The simulator uses these traits if it is configured with matrix units.
inline constexpr DeviceTraits kHopperTraits = {
    .matrix_units = true,
    .multiprocessors = 132,
    .threadgroup_memory = 227 << 10,
};

DeviceTraits device_traits(const mx::Device& device);

}  // namespace mlx_anvil

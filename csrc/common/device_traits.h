// What the choice of a kernel, its tiles and its grid depends on in a GPU. The backend fills it in.
#pragma once

#include <cstdint>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

struct DeviceTraits {
  // Units for matrix products of 16-bit numbers, many times as fast as the other arithmetic.
  bool matrix_units = false;

  // The other traits are known where there are matrix units.
  int64_t multiprocessors = 0;
  int64_t threadgroup_memory = 0;  // bytes per multiprocessor, for its resident threadgroups
};

// An H100 or H200. The simulator stands for one where it is told to have matrix units.
inline constexpr DeviceTraits kHopperTraits = {
    .matrix_units = true,
    .multiprocessors = 132,
    .threadgroup_memory = 227 << 10,
};

DeviceTraits device_traits(const mx::Device& device);

}  // namespace mlx_anvil

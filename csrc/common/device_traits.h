// Facts about a GPU that select kernels, tiles and grids. The backend fills them in; the ops' GPU
// launches read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// The sizes in which Apple makes a generation of GPUs.
enum class AppleGpuClass : int32_t { kUnknown, kPhone, kBase, kPro, kMax, kUltra };

struct AppleGpu {
  int32_t generation = 0;  // of the architecture: 13 is M1's, 17 is M5's; 0 if unknown
  AppleGpuClass size = AppleGpuClass::kUnknown;
  int32_t cores = 0;                 // of the largest such chip that is sold; 0 if unknown
  bool neural_accelerators = false;  // and MLX's kernels use them

  bool operator==(const AppleGpu&) const = default;
};

// What Metal's names of a GPU say: `architecture` such as "applegpu_g16s", `name` such as
// "Apple M4 Max". Assumes an MLX with kernels for neural accelerators.
AppleGpu apple_gpu(std::string_view architecture, std::string_view name);

struct DeviceTraits {
  // Matrix units for 16-bit operands, which are many times faster than the other arithmetic.
  bool matrix_units = false;

  // These are set only if there are matrix units.
  bool group_products = false;  // they multiply for four SIMD groups at once (group_product.h)
  int64_t multiprocessors = 0;
  int64_t threadgroup_memory = 0;  // bytes per multiprocessor, for its resident threadgroups

  AppleGpu apple = {};  // Metal only

  bool is_nvidia() const { return multiprocessors > 0; }
};

// Bytes of a multiprocessor's memory that NVIDIA's driver reserves for each resident threadgroup.
inline constexpr int64_t kReservedThreadgroupMemory = 1 << 10;

// An H100 or H200. The simulator uses these traits if it is configured with matrix units.
inline constexpr DeviceTraits kHopperTraits = {
    .matrix_units = true,
    .multiprocessors = 132,
    .threadgroup_memory = 227 << 10,
};

DeviceTraits device_traits(const mx::Device& device);

// What MLX's description of the GPU says, such as its "device_name"; empty if it has no such text.
std::string gpu_fact(const std::string& key);

}  // namespace mlx_anvil

// Parameters of the elementwise kernels, shared by the host (C++) and the kernels (MSL). The fields
// are plain 32- and 64-bit integers in an order without padding, so both compilers lay them out
// alike.
#pragma once

#define MLX_ANVIL_ELEMENTWISE_MAX_RANK 8
#define MLX_ANVIL_ELEMENTWISE_MAX_INPUTS 4

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct ElementwiseParams {
  int64_t size;  // elements of each output
  int64_t shape[MLX_ANVIL_ELEMENTWISE_MAX_RANK];
  int64_t strides[MLX_ANVIL_ELEMENTWISE_MAX_INPUTS][MLX_ANVIL_ELEMENTWISE_MAX_RANK];  // in elements
  int32_t rank;
  float scalar;  // a number of the op, such as a limit
};

static_assert(sizeof(ElementwiseParams) == 8 * (1 + 8 + 4 * 8) + 8, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

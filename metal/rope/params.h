// Parameters of the kernels of rope, shared by the host (C++) and the kernels (MSL).
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct RopeParams {
  int64_t strides[2][4];  // of the inputs: batch, head, position, column; in elements
  int32_t heads[2];       // of each tensor; 0: there is no second
  int32_t batch;
  int32_t length;
  int32_t head_dim;
  int32_t pairs;
  int32_t chunk;        // heads, of both tensors, that a thread takes
  int32_t chunks;       // so many cover all heads
  int32_t offset_step;  // 1 with an offset for each batch row, else 0
  float turns_high;     // positions times turns_high + turns_low, over a frequency, are turns
  float turns_low;
  float direction;  // 1, or -1 for the inverse rotation
};

static_assert(sizeof(RopeParams) == 8 * 8 + 4 * 12, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

// Parameters of ssd_scan's kernels, shared by the host (C++) and the kernels (MSL).
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct SsdStepsParams {
  int64_t dt_strides[2];  // in elements: batch, step
  int64_t a_stride;       // batch
  int64_t bias_stride;
  int64_t rows;  // batch rows times steps
  int32_t length;
  int32_t heads;
  float least;  // of dt
  float most;
};

static_assert(sizeof(SsdStepsParams) == 8 * 5 + 4 * 4, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

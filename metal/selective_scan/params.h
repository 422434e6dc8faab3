// Parameters of selective_scan's kernels, shared by the host (C++) and the kernels (MSL).
#pragma once

#ifndef __METAL__
#include <cstdint>

namespace mlx_anvil {
#endif

// Strides of rows, in elements: of a batch and of a step.
struct ScanStrides {
  int64_t batch;
  int64_t step;
};

struct SelectiveScanParams {
  ScanStrides x, dt, b, c, z, d_y;
  int32_t batch;
  int32_t steps;
  int32_t channels;
  int32_t states;
  int32_t chunks;  // of the steps, whose first states are kept
  int32_t groups;  // of the channels, with sums of their own
};

static_assert(sizeof(SelectiveScanParams) == 6 * 16 + 6 * 4, "same layout in C++ and MSL");

struct SelectiveScanSumParams {
  uint32_t parts;
  uint32_t count;  // of sums
};

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

// Parameters of selective_scan's kernels, shared by the host (C++) and the kernels (MSL).
#pragma once

#ifndef __METAL__
#include <cstdint>

namespace mlx_anvil {
#endif

// Strides of rows, in elements: of a batch and of a step.
struct ScanRowParams {
  int64_t batch;
  int64_t step;
};

static_assert(sizeof(ScanRowParams) == 16, "same layout in C++ and MSL");

struct SelectiveScanParams {
  ScanRowParams x;
  ScanRowParams dt;
  ScanRowParams b;
  ScanRowParams c;
  ScanRowParams z;
  ScanRowParams d_y;
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

static_assert(sizeof(SelectiveScanSumParams) == 8, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

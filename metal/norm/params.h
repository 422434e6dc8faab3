// Parameters of the norm kernels, shared by the host (C++, CPU kernels included) and the kernels
// (MSL). The fields are plain 32- and 64-bit numbers in an order without padding, so that both
// compilers lay them out alike.
//
// Bindings. Forward:   x residual gate weight bias | y h | params
//           backward:  h gate weight d_y d_h | d_x d_gate d_weight_parts d_bias_parts | params
//           sum_parts: parts parts | sum sum | params
// The host binds some other array in place of an absent one.
#pragma once

#define MLX_ANVIL_NORM_ROW_AXES 4

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

// Layout of an array's rows: all axes but the last, merged where their strides allow it. Row-major
// order; strides are in elements.
struct NormRowParams {
  int64_t strides[MLX_ANVIL_NORM_ROW_AXES];
  int64_t column_stride;
  uint32_t extents[MLX_ANVIL_NORM_ROW_AXES];
  uint32_t axes;  // at least 1
  uint32_t unused;
};

// `Rows` is a pointer to NormRowParams in any address space. The function is static because each
// build of the CPU kernels needs its separate copy (csrc/common/isa.h).
template <typename Rows>
static inline int64_t norm_row_offset(Rows rows, uint32_t row) {
  int64_t offset = 0;
#ifdef __METAL__
  _Pragma("clang loop unroll(disable)")
#endif
      for (uint32_t axis = rows->axes - 1; axis > 0; --axis) {
    const uint32_t rest = row / rows->extents[axis];
    offset += (row - rest * rows->extents[axis]) * rows->strides[axis];
    row = rest;
  }
  return offset + row * rows->strides[0];
}

struct NormParams {
  NormRowParams x;  // h in backward
  NormRowParams residual;
  NormRowParams gate;
  NormRowParams weight;  // one row per group
  NormRowParams bias;
  NormRowParams d_y;
  NormRowParams d_h;
  uint32_t rows;
  uint32_t rows_per_group;   // consecutive rows that share one row of weight and bias
  uint32_t parts_per_group;  // backward splits the rows of a group into this many parts
  uint32_t rows_per_part;
  uint32_t columns;
  float eps;
  float weight_offset;
  uint32_t gate_is_sigmoid;  // else silu
};

struct NormSumParams {
  uint32_t columns;
  uint32_t parts;  // parts per sum
};

static_assert(sizeof(NormRowParams) == 8 * 5 + 4 * 6, "same layout in C++ and MSL");
static_assert(sizeof(NormParams) == 7 * sizeof(NormRowParams) + 4 * 8,
              "same layout in C++ and MSL");
static_assert(sizeof(NormSumParams) == 4 * 2, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

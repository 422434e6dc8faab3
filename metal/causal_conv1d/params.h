// Parameters of the kernels of causal_conv1d, shared by the host (C++) and the kernels (MSL). The
// fields are plain 32- and 64-bit numbers in an order without padding.
//
// Bindings. Forward:   x weight bias state lengths | y new_state | params
//           backward:  x weight bias state lengths d_y d_new_state
//                      | d_x d_state d_weight_parts d_bias_parts | params
//           sum_parts: weight_parts bias_parts | d_weight d_bias | params
// The host binds some other array in place of an absent one.
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

// The strides of an array [batch, rows, channels], in elements. That of the channels is 1.
struct CausalConvRowParams {
  int64_t batch;
  int64_t row;
};

struct CausalConvParams {
  CausalConvRowParams x;
  CausalConvRowParams state;
  CausalConvRowParams d_y;
  CausalConvRowParams d_new_state;
  uint32_t batch;
  uint32_t length;
  uint32_t channels;
  uint32_t batch_per_group;  // batch entries that share weight and bias
  uint32_t rows_per_run;     // of a thread
  uint32_t runs;             // per batch entry
};

struct CausalConvSumParams {
  uint32_t channels;
  uint32_t width;
  uint32_t parts;  // per group
};

static_assert(sizeof(CausalConvRowParams) == 8 * 2, "same layout in C++ and MSL");
static_assert(sizeof(CausalConvParams) == 8 * 8 + 6 * 4, "same layout in C++ and MSL");
static_assert(sizeof(CausalConvSumParams) == 3 * 4, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

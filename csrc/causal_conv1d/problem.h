// A call of causal_conv1d as its CPU kernels see it. Plain data, because kernel files include this
// header (isa.h says why they include no other kind).
//
// The rows of a batch are numbered with the state in front: row u of [0, length + width - 1) is a
// row of the state if u < width - 1, else row u - (width - 1) of x. Output t is of rows t to
// t + width - 1.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace mlx_anvil {

inline constexpr int kConvLeastWidth = 2;
inline constexpr int kConvMostWidth = 8;
inline constexpr int kConvWidths = kConvMostWidth - kConvLeastWidth + 1;

// An array [batch, rows, channels] whose channels are adjacent. Strides are in elements; `data` is
// null if the call lacks it.
struct ConvRows {
  const void* data = nullptr;
  int64_t batch_stride = 0, row_stride = 0;
};

struct ConvProblem {
  KernelDtype dtype;
  int width;
  bool silu;
  int64_t batch, length, channels;
  int64_t groups;  // of batch entries, each with its own weight and bias
  ConvRows x, state;
  const void* weight;      // [groups, channels, width]
  const void* bias;        // [groups, channels], or null
  const int32_t* lengths;  // [batch], or null: all of `length`

  int64_t batch_per_group() const { return groups > 0 ? batch / groups : 0; }
};

// The outputs are dense.
struct ConvForwardArgs {
  ConvProblem of;
  void* y;          // [batch, length, channels]
  void* new_state;  // [batch, width - 1, channels]
  bool stream_outputs;
};

struct ConvBackwardArgs {
  ConvProblem of;
  ConvRows d_y, d_new_state;
  void* d_x;
  void* d_state;    // null if there is no state
  void* d_weight;   // null if no sums are wanted
  void* d_bias;     // null if there is no bias, or no sums are wanted
  bool stream_d_x;  // use streaming stores
};

}  // namespace mlx_anvil

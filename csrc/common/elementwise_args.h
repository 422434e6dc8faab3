// Arguments of elementwise CPU kernels. Plain data, because kernel files include this header (isa.h
// says why they include no other kind).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace mlx_anvil {

inline constexpr int kElementwiseMaxInputs = 4;
inline constexpr int kElementwiseMaxOutputs = 2;
inline constexpr int kElementwiseMaxRank = 8;

struct ElementwiseArgs {
  const void* inputs[kElementwiseMaxInputs];
  void* outputs[kElementwiseMaxOutputs];
  int rank;                                       // at least 1
  const int64_t* shape;                           // [rank]
  const int64_t* strides[kElementwiseMaxInputs];  // [rank], in elements
  float scalar;                                   // a number of the op, such as a limit
  bool stream_outputs;                            // use streaming stores
};

// Computes output elements [begin, end) in memory order.
using ElementwiseKernel = void (*)(const ElementwiseArgs&, int64_t begin, int64_t end);

using ElementwiseKernels = PerDtype<ElementwiseKernel>;

}  // namespace mlx_anvil

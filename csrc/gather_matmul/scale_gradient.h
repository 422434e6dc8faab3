// Gradients of gathered products in scales and biases.
#pragma once

#include "gather_matmul/primitive.h"

namespace mlx_anvil {

// The product that is differentiated, in the order of its arguments.
struct GatherScaleCall {
  const char* op;
  QuantizedFormat format;
  QuantizedProduct product;
  bool has_scales;  // if false, only the gradient in biases is wanted
};

// Returns the gradients in scales (if wanted) and biases, with the leading axes of w: for each
// expert, the sums over groups of dy^T x, times codes for scales. A primitive of CPU streams.
Arrays apply_gather_scale_gradient(
    const GatherScaleCall& call, mx::array dy, mx::array x, mx::array w, PairIds ids, mx::Stream s);

// The same as a graph, which stores the gradient in the dequantised weights.
Arrays compose_gather_scale_gradient(const GatherScaleCall& call,
                                     const mx::array& dy,
                                     const mx::array& x,
                                     const mx::array& w,
                                     const PairIds& ids,
                                     mx::Stream s);

}  // namespace mlx_anvil

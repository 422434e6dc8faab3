// Memory layout of an elementwise call, computed by elementwise.cpp.
#pragma once

#include "common/elementwise_args.h"
#include "common/primitive.h"

namespace mlx_anvil {

// Strides of the inputs, after merging adjacent axes that are contiguous in all of them. The
// outputs are dense, in the order of `shape`.
struct ElementwiseLayout {
  int rank = 0;
  int64_t size = 0;
  int64_t shape[kElementwiseMaxRank] = {};
  int64_t strides[kElementwiseMaxInputs][kElementwiseMaxRank] = {};  // in elements
  bool flat = false;      // every input is dense in the outputs' order
  bool in_place = false;  // an output reuses an input's memory

  int64_t width() const { return shape[rank - 1]; }
};

// Computes the layout and allocates the outputs. An output reuses a donatable input's memory: each
// element is read before it is written.
ElementwiseLayout prepare_elementwise(const Arrays& inputs,
                                      Arrays& outputs,
                                      const mx::Stream& stream);

}  // namespace mlx_anvil

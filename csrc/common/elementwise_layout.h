#pragma once

#include "common/elementwise_args.h"
#include "common/primitive.h"

namespace mlx_anvil {

// How the inputs of an elementwise op lie in memory, after merging every two axes that are one axis
// in all of them. The outputs are dense, in the order in which `shape` runs.
struct ElementwiseLayout {
  int rank = 0;
  int64_t size = 0;
  int64_t shape[kElementwiseMaxRank] = {};
  int64_t strides[kElementwiseMaxInputs][kElementwiseMaxRank] = {};  // in elements
  bool flat = false;      // every input is dense in the outputs' order
  bool in_place = false;  // an output uses an input's memory

  int64_t width() const { return shape[rank - 1]; }
};

// Finds the layout and gives every output memory: an input's own where MLX says that nobody else
// needs it (each element is read before it is written), else fresh.
ElementwiseLayout prepare_elementwise(const Arrays& inputs,
                                      Arrays& outputs,
                                      const mx::Stream& stream);

}  // namespace mlx_anvil

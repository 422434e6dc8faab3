// Donation to primitives with several outputs.
#pragma once

#include <algorithm>
#include <exception>
#include <vector>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// MLX evaluates a primitive through one of its outputs, which owns `inputs`, and clears the inputs
// of all outputs afterwards. Clears those of the other outputs already, unless the graph is traced.
// An exception restores them.
class SiblingsWithoutInputs {
 public:
  SiblingsWithoutInputs(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs)
      : inputs_(inputs) {
    const auto owns = [&](mx::array& out) { return &out.inputs() == &inputs; };
    if (outputs[0].is_tracer() || std::none_of(outputs.begin(), outputs.end(), owns)) {
      return;
    }
    for (mx::array& out : outputs) {
      if (!owns(out)) {
        out.inputs().clear();
        siblings_.push_back(out);
      }
    }
  }
  SiblingsWithoutInputs(const SiblingsWithoutInputs&) = delete;
  SiblingsWithoutInputs& operator=(const SiblingsWithoutInputs&) = delete;
  ~SiblingsWithoutInputs() {
    if (std::uncaught_exceptions() > exceptions_) {
      for (mx::array& out : siblings_) {
        out.inputs() = inputs_;
      }
    }
  }

 private:
  const std::vector<mx::array>& inputs_;
  std::vector<mx::array> siblings_;
  const int exceptions_ = std::uncaught_exceptions();
};

}  // namespace mlx_anvil

// Ops traced by mx.compile(shapeless=True).
//
// MLX runs such a graph for other shapes without calling the ops again: it only calls each
// primitive's output_shapes(). Anything an op derived from a shape while tracing (a default, a
// route, a reduction axis, a broadcast shape) would keep its first value. Each op is therefore one
// node in such a trace, as is each derivative and each vmap of it. The node builds its graph once
// the shapes are known.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>

#include "common/primitive.h"

namespace mlx_anvil {

// Builds a graph from its inputs. The number and dtypes of the results must not depend on shapes.
using Graph = std::function<Arrays(const Arrays&)>;

// Returns true if MLX runs a shapeless trace and one of the arrays belongs to it. Null entries are
// ignored.
bool traces_shapeless(std::initializer_list<const mx::array*> arrays);

// Returns the results of `graph` as outputs of one node. `graph` checks its inputs, which have no
// data, and throws the op's errors: at the call, and again for other shapes.
Arrays shapeless_node(const char* op, mx::Stream stream, Arrays inputs, const Graph& graph);

// Passes optional arguments as inputs of a node.
class OptionalInputs {
 public:
  static void append(Arrays& inputs, const std::optional<mx::array>& x) {
    if (x) {
      inputs.push_back(*x);
    }
  }

  OptionalInputs(const Arrays& inputs, size_t first) : inputs_(inputs), next_(first) {}

  // Replaces `x` by the next input, if `x` has a value.
  void replace(std::optional<mx::array>& x) {
    if (x) {
      x = inputs_[next_++];
    }
  }

 private:
  const Arrays& inputs_;
  size_t next_;
};

}  // namespace mlx_anvil

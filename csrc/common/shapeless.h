// Ops in a graph that mx.compile(shapeless=True) traces.
//
// MLX runs such a graph for other shapes without calling the ops again: it asks each primitive for
// its output_shapes(). What an op read off a shape when it was traced (a default, a route, an axis
// to sum over, a shape to broadcast to) would stay that of the first call. So there an op is one
// node, as is each of its derivatives and vmaps: it builds its graph when it has the shapes.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>

#include "common/primitive.h"

namespace mlx_anvil {

// Builds a graph from its inputs. The number and dtypes of the results do not depend on shapes.
using Graph = std::function<Arrays(const Arrays&)>;

// Whether MLX traces for any shapes and one of the arrays is of that trace. Null: no array.
bool traces_shapeless(std::initializer_list<const mx::array*> arrays);

// The results of `graph` as those of one node. `graph` checks its inputs, which come without
// numbers, and throws what the op throws: at the call, and for other shapes when they come.
Arrays shapeless_node(const char* op, mx::Stream stream, Arrays inputs, const Graph& graph);

// Optional arguments among the inputs of a node, and back.
class OptionalInputs {
 public:
  static void append(Arrays& inputs, const std::optional<mx::array>& x) {
    if (x) {
      inputs.push_back(*x);
    }
  }

  OptionalInputs(const Arrays& inputs, size_t first) : inputs_(inputs), next_(first) {}

  // The next input where `x` is given.
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

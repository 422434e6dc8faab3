// What gated_delta and ssd_scan do with a call that has been checked.
#pragma once

#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "common/shapeless.h"
#include "gated_delta/compose.h"

namespace mlx_anvil {

// Runs the steps in a kernel, or as a graph of MLX ops. The config's flags of arrays are set here.
// in.positions may be empty. `dtype`: of y.
GatedDeltaResult run_recurrence(GatedDeltaConfig config,
                                GatedDeltaInputs in,
                                mx::Dtype dtype,
                                mx::Stream s);

// Names the outputs of a node: y, the last state and, if positions were given, the states there.
GatedDeltaResult result_of(const Arrays& outputs);

// Those of a call's optional arrays that it has.
std::vector<mx::array*> present(std::initializer_list<std::optional<mx::array>*> optional,
                                ReturnStates& return_states);

// The call as a node of a shapeless graph, if one is traced; else nothing. `arrays` are those that
// the op always has, `extras_of(options)` points to the others, and call(inputs, options) calls the
// op with other arrays.
template <class Options, class Extras, class Call>
std::optional<GatedDeltaResult> when_shapeless(const char* op,
                                               Arrays arrays,
                                               const Options& options,
                                               Extras extras_of,
                                               Call call,
                                               mx::Stream s) {
  const size_t required = arrays.size();
  Options own = options;
  bool traced = false;
  for (mx::array* x : extras_of(own)) {
    arrays.push_back(*x);
  }
  for (const mx::array& x : arrays) {
    traced = traced || traces_shapeless({&x});
  }
  if (!traced) {
    return std::nullopt;
  }
  const auto graph = [=](const Arrays& in) -> Arrays {
    Options own = options;
    size_t at = required;
    for (mx::array* x : extras_of(own)) {
      *x = in[at++];
    }
    const GatedDeltaResult result = call(in, own);
    Arrays outputs = {result.y, result.state};
    OptionalInputs::append(outputs, result.states);
    return outputs;
  };
  return result_of(shapeless_node(op, s, std::move(arrays), graph));
}

}  // namespace mlx_anvil

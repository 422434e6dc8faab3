// Ring attention as a graph with derivatives of its own.
#include <functional>
#include <numeric>
#include <utility>

#include "distributed/ring_graph.h"
#include "distributed/ring_node.h"

namespace mlx_anvil {

namespace {

using ArrayFunction = std::function<Arrays(const Arrays&)>;

// `shortest`, with derivatives in forward mode of `same` (see RingGraph).
ArrayFunction with_derivatives(
    ArrayFunction shortest,
    ArrayFunction same,
    std::function<Arrays(const Arrays&, const Arrays&, const Arrays&)> gradient) {
  const auto tangent = [same = std::move(same)](const Arrays& primals, const Arrays& tangents,
                                                const std::vector<int>& argnums) {
    Arrays moving;
    for (int i : argnums) {
      moving.push_back(primals[static_cast<size_t>(i)]);
    }
    const ArrayFunction of_moving = [&](const Arrays& x) {
      Arrays all = primals;
      for (size_t i = 0; i < argnums.size(); ++i) {
        all[static_cast<size_t>(argnums[i])] = x[i];
      }
      return same(all);
    };
    return mx::jvp(of_moving, moving, tangents).second;
  };
  return mx::custom_function(std::move(shortest), std::move(gradient), tangent);
}

}  // namespace

Arrays compose_ring_attention(const RingConfig& config, const RingInputs& in, mx::Stream s) {
  const size_t count = inputs_of(in).size();
  const auto given = [config](const Arrays& x) { return ring_inputs(config, x); };
  const auto forward = [=](RingGraph kind) -> ArrayFunction {
    return [=](const Arrays& x) { return ring_forward_graph(config, given(x), kind, s); };
  };
  // Takes the inputs of `forward`, then its results, then the gradients of these.
  const auto backward = [=](RingGraph kind) -> ArrayFunction {
    return [=](const Arrays& x) {
      return ring_backward_graph(config, given(x), x[count], x[count + 1], x[count + 2],
                                 x[count + 3], kind, s);
    };
  };
  const auto gradient = [=](const Arrays& x, const Arrays& cotangents, const Arrays& results) {
    const auto again = [=](const Arrays& primals, const Arrays& of_gradients, const Arrays&) {
      return mx::vjp(backward(RingGraph::kSame), primals, of_gradients).second;
    };
    Arrays inputs = x;
    inputs.insert(inputs.end(), results.begin(), results.end());
    inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
    const Arrays gradients =
        with_derivatives(backward(RingGraph::kShortest), backward(RingGraph::kSame), again)(inputs);
    std::vector<int> all(x.size());
    std::iota(all.begin(), all.end(), 0);
    return selected_gradients(config, gradients, x, all, s);
  };
  return with_derivatives(forward(RingGraph::kShortest), forward(RingGraph::kSame),
                          gradient)(inputs_of(in));
}

}  // namespace mlx_anvil

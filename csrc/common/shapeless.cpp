#include "common/shapeless.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/block.h"
#include "common/errors.h"
#include "common/evaluate.h"
#include "common/plan.h"
#include "common/select.h"
#include "common/trace.h"

namespace mlx_anvil {

namespace {

thread_local int open_graphs = 0;

// While a graph is built, its stream is MLX's default: MLX's transformations place arrays of zeros
// on the default stream. MLX's StreamContext is unsuitable, it leaves another device's default
// changed.
class BuildScope {
 public:
  explicit BuildScope(mx::Stream stream)
      : device_(mx::default_device()), stream_(mx::default_stream(stream.device)) {
    mx::set_default_device(stream.device);
    mx::set_default_stream(stream);
    ++open_graphs;
  }
  ~BuildScope() {
    --open_graphs;
    mx::set_default_stream(stream_);
    mx::set_default_device(device_);
  }
  BuildScope(const BuildScope&) = delete;
  BuildScope& operator=(const BuildScope&) = delete;

 private:
  const mx::Device device_;
  const mx::Stream stream_;
};

// MLX does not export whether the current trace is shapeless. In a shapeless trace, however, the
// nodes of a broadcast take every array whose shape they depend on.
bool is_shapeless_trace() {
  static const Arrays unequal = {mx::array({1}, mx::float32, nullptr, {}),
                                 mx::array({2}, mx::float32, nullptr, {})};
  return mx::broadcast_arrays(unequal, mx::Device::cpu)[0].inputs().size() > 1;
}

// An array without data: only its shape and dtype are read.
mx::array stand_in(const mx::Shape& shape, mx::Dtype dtype) {
  return mx::array(shape, dtype, nullptr, {});
}

Arrays without_data(const Arrays& inputs) {
  Arrays all;
  all.reserve(inputs.size());
  for (const mx::array& x : inputs) {
    all.push_back(stand_in(x.shape(), x.dtype()));
  }
  return all;
}

bool are_same(const Arrays& a, const Arrays& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const mx::array& x, const mx::array& y) { return x.id() == y.id(); });
}

// Returns what a broadcast cotangent was broadcast from: mx::vmap would fix the broadcast to the
// current shape.
mx::array before_broadcast(mx::array x) {
  while (x.has_primitive() && std::string(x.primitive().name()) == "Broadcast") {
    x = mx::array(x.inputs()[0]);
  }
  return x;
}

class ShapelessNode : public FusedPrimitive {
 public:
  // `outline` returns arrays with the shapes and dtypes of the results of `graph`. It runs during a
  // shapeless trace, where MLX's own transformations fail.
  ShapelessNode(mx::Stream stream, const char* op, Graph graph, Graph outline)
      : FusedPrimitive(stream), op_(op), graph_(std::move(graph)), outline_(std::move(outline)) {}

  static Arrays make(const char* op, mx::Stream stream, Arrays inputs, Graph graph, Graph outline) {
    auto node = std::make_shared<ShapelessNode>(stream, op, std::move(graph), std::move(outline));
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (const mx::array& x : node->build(node->outline_, without_data(inputs))) {
      shapes.push_back(x.shape());
      dtypes.push_back(x.dtype());
    }
    return mx::array::make_arrays(std::move(shapes), dtypes, node, inputs);
  }

  const char* op() const override { return op_; }
  const char* kind() const override { return "AnvilShapeless"; }
  bool is_equivalent(const mx::Primitive& other) const override { return this == &other; }

  Arrays compose(const Arrays& inputs) override { return build(graph_, inputs); }

  // Runs in the first call after tracing, and whenever the traced graph is called with other
  // shapes. Errors are raised then.
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const Arrays results = compose(without_data(inputs));
    if (!all_on_stream(results, stream())) {
      throw_value_error(op_,
                        "a graph of MLX ops on several devices is compiled with shapeless=True; "
                        "allowed: mx.compile(function).");
    }
    std::vector<mx::Shape> shapes;
    for (const mx::array& x : results) {
      shapes.push_back(x.shape());
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    evaluate(inputs, outputs);
  }
  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    evaluate(inputs, outputs);
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override;
  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override;
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override;

 private:
  // The graph as a function of the inputs at `argnums`.
  static Graph in_some(const Graph& graph, const Arrays& inputs, const std::vector<int>& argnums) {
    return [&graph, &inputs, &argnums](const Arrays& values) {
      return graph(substitute(inputs, argnums, values));
    };
  }

  Arrays build(const Graph& graph, const Arrays& inputs) {
    SimulationScope simulation(simulation_of_call());
    BuildScope scope(stream());
    try {
      return graph(inputs);
    } catch (const std::exception& error) {
      const std::string text = error.what();
      if (text.starts_with(op_message(op_, ""))) {
        throw;
      }
      throw_value_error(op_, "in a graph compiled with shapeless=True: " + text);
    }
  }

  void evaluate(const Arrays& inputs, Arrays& outputs);

  const char* const op_;
  const Graph graph_;
  const Graph outline_;
};

Arrays ShapelessNode::gradient(const Arrays& primals,
                               const Arrays& cotangents,
                               const std::vector<int>& argnums,
                               const Arrays& outputs) {
  // Integer outputs have no cotangents. MLX would supply zeros, whose shape its vmap fixes.
  std::vector<int> differentiable;
  Arrays inputs = primals;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (mx::issubdtype(outputs[i].dtype(), mx::floating)) {
      differentiable.push_back(static_cast<int>(i));
      inputs.push_back(before_broadcast(cotangents[i]));
    }
  }
  const auto count = static_cast<int64_t>(primals.size());
  const auto primals_of = [count](const Arrays& in) {
    return Arrays(in.begin(), in.begin() + count);
  };
  const Graph graph = [=, graph = graph_, s = stream()](const Arrays& in) {
    const Arrays all = primals_of(in);
    const Graph function = in_some(graph, all, argnums);
    const Graph to_differentiable = [&](const Arrays& values) {
      return copy_repeated_results(select(function(values), differentiable), s);
    };
    const Arrays at = select(all, argnums), results = to_differentiable(at);
    Arrays cotangents(in.begin() + count, in.end());
    for (size_t i = 0; i < cotangents.size(); ++i) {
      cotangents[i] = mx::broadcast_to(cotangents[i], results[i].shape(), s);
    }
    return mx::vjp(to_differentiable, at, cotangents).second;
  };
  const Graph outline = [argnums](const Arrays& in) { return select(in, argnums); };
  return make(op_, stream(), std::move(inputs), graph, outline);
}

Arrays ShapelessNode::tangent(const Arrays& primals,
                              const Arrays& tangents,
                              const std::vector<int>& argnums) {
  const auto count = static_cast<int64_t>(primals.size());
  const auto primals_of = [count](const Arrays& in) {
    return Arrays(in.begin(), in.begin() + count);
  };
  Arrays inputs = primals;
  inputs.insert(inputs.end(), tangents.begin(), tangents.end());
  const Graph graph = [=, graph = graph_](const Arrays& in) {
    const Arrays all = primals_of(in);
    return mx::jvp(in_some(graph, all, argnums), select(all, argnums),
                   Arrays(in.begin() + count, in.end()))
        .second;
  };
  const Graph outline = [=, outline = outline_](const Arrays& in) {
    return outline(primals_of(in));
  };
  return make(op_, stream(), std::move(inputs), graph, outline);
}

std::pair<Arrays, std::vector<int>> ShapelessNode::batched(const Arrays& inputs,
                                                           const std::vector<int>& axes) {
  const Graph graph = [graph = graph_, axes](const Arrays& in) {
    return mx::vmap(graph, axes)(in);
  };
  const Graph outline = [outline = outline_, axes](const Arrays& in) {
    Arrays elements;
    int count = 1;
    for (size_t i = 0; i < in.size(); ++i) {
      mx::Shape shape = in[i].shape();
      if (axes[i] >= 0) {
        count = shape[axes[i]];
        shape.erase(shape.begin() + axes[i]);
      }
      elements.push_back(stand_in(shape, in[i].dtype()));
    }
    Arrays results;
    for (const mx::array& x : outline(elements)) {
      mx::Shape shape = x.shape();
      shape.insert(shape.begin(), count);
      results.push_back(stand_in(shape, x.dtype()));
    }
    return results;
  };
  const Arrays outputs = make(op_, stream(), inputs, graph, outline);
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

void ShapelessNode::evaluate(const Arrays& inputs, Arrays& outputs) {
  Arrays stand_ins = without_data(inputs);
  const Arrays results = [&] {
    FallbacksUnnoted noted_already;
    return compose(stand_ins);
  }();
  // A graph of one primitive is evaluated as that primitive, which may then reuse its inputs'
  // memory.
  if (!results.empty() && results[0].has_primitive() && are_same(results[0].outputs(), results) &&
      are_same(results[0].inputs(), stand_ins)) {
    evaluate_primitive(results[0].primitive(), inputs, outputs);
    return;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    stand_ins[i].copy_shared_buffer(inputs[i]);
  }
  if (planning()) {
    plan_graph(results);
    for (mx::array& output : outputs) {
      output.set_data(planned_memory());
    }
    return;
  }
  evaluate_graph(results, stand_ins, stream());
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i].copy_shared_buffer(results[i]);
  }
}

}  // namespace

bool traces_shapeless(std::initializer_list<const mx::array*> arrays) {
  // A graph under construction has concrete shapes. In composed(), ops are MLX ops, which can be
  // exported.
  return open_graphs == 0 && !composing() &&
         std::any_of(arrays.begin(), arrays.end(),
                     [](const mx::array* x) { return x && x->is_tracer(); }) &&
         is_shapeless_trace();
}

Arrays shapeless_node(const char* op, mx::Stream stream, Arrays inputs, const Graph& graph) {
  return ShapelessNode::make(op, stream, std::move(inputs), graph, graph);
}

}  // namespace mlx_anvil

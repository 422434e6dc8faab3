#include "common/shapeless.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/errors.h"
#include "common/evaluate.h"
#include "common/plan.h"
#include "common/trace.h"

namespace mlx_anvil {

namespace {

thread_local int open_graphs = 0;

// MLX's default stream is that of the node while its graph is built: transformations of MLX put
// arrays of zeros there. MLX's StreamContext would leave the default of another device changed.
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

// MLX does not export whether it traces for any shapes. But then the nodes of a broadcast have all
// the arrays whose shapes they depend on.
bool is_shapeless_trace() {
  static const Arrays unequal = {mx::array({1}, mx::float32, nullptr, {}),
                                 mx::array({2}, mx::float32, nullptr, {})};
  return mx::broadcast_arrays(unequal, mx::Device::cpu)[0].inputs().size() > 1;
}

Arrays without_numbers(const Arrays& inputs) {
  Arrays all;
  all.reserve(inputs.size());
  for (const mx::array& x : inputs) {
    all.emplace_back(x.shape(), x.dtype(), nullptr, Arrays{});
  }
  return all;
}

// With a copy for each that comes again: of the cotangents of a result that is there twice, mx::vjp
// (0.32.4) takes the first and drops the others.
Arrays each_its_own(Arrays results, mx::Stream stream) {
  for (size_t i = 1; i < results.size(); ++i) {
    const auto is_result = [&](const mx::array& x) { return x.id() == results[i].id(); };
    if (std::any_of(results.begin(), results.begin() + static_cast<int64_t>(i), is_result)) {
      results[i] = mx::copy(results[i], stream);
    }
  }
  return results;
}

bool are_same(const Arrays& a, const Arrays& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const mx::array& x, const mx::array& y) { return x.id() == y.id(); });
}

class ShapelessNode : public FusedPrimitive {
 public:
  ShapelessNode(mx::Stream stream, const char* op, Graph graph)
      : FusedPrimitive(stream), op_(op), graph_(std::move(graph)) {}

  const char* op() const override { return op_; }
  const char* name() const override { return "AnvilShapeless"; }
  bool is_equivalent(const mx::Primitive& other) const override { return this == &other; }

  Arrays compose(const Arrays& inputs) override {
    SimulationScope simulation(simulation_of_call());
    BuildScope scope(stream());
    return graph_(inputs);
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (const mx::array& x : compose(without_numbers(inputs))) {
      shapes.push_back(x.shape());
    }
    return shapes;
  }

  void eval_native(const Arrays& inputs, Arrays& outputs) override { evaluate(inputs, outputs); }
  void eval_kernels(const Arrays& inputs, Arrays& outputs) override { evaluate(inputs, outputs); }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    return transformed(primals, cotangents, argnums,
                       [](const Graph& graph, const Arrays& at, const Arrays& cotangents) {
                         return mx::vjp(graph, at, cotangents).second;
                       });
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    return transformed(primals, tangents, argnums,
                       [](const Graph& graph, const Arrays& at, const Arrays& tangents) {
                         return mx::jvp(graph, at, tangents).second;
                       });
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const Arrays outputs = shapeless_node(
        op_, stream(), inputs,
        [graph = graph_, axes](const Arrays& in) { return mx::vmap(graph, axes)(in); });
    return {outputs, std::vector<int>(outputs.size(), 0)};
  }

 private:
  // A node for vjp or jvp in the inputs at `argnums`; `others` are its cotangents or tangents.
  template <class Transform>
  Arrays transformed(const Arrays& primals,
                     const Arrays& others,
                     const std::vector<int>& argnums,
                     Transform transform) {
    const auto count = static_cast<int64_t>(primals.size());
    Arrays inputs = primals;
    inputs.insert(inputs.end(), others.begin(), others.end());
    const Graph derivative = [graph = graph_, count, argnums, transform,
                              s = stream()](const Arrays& in) {
      const Arrays all(in.begin(), in.begin() + count);
      Arrays at;
      for (int i : argnums) {
        at.push_back(all[i]);
      }
      const Graph of_selected = [&](const Arrays& values) {
        Arrays moved = all;
        for (size_t i = 0; i < argnums.size(); ++i) {
          moved[argnums[i]] = values[i];
        }
        return each_its_own(graph(moved), s);
      };
      return transform(of_selected, at, Arrays(in.begin() + count, in.end()));
    };
    return shapeless_node(op_, stream(), std::move(inputs), derivative);
  }

  void evaluate(const Arrays& inputs, Arrays& outputs) {
    Arrays stand_ins = without_numbers(inputs);
    const Arrays results = [&] {
      FallbacksUnnoted noted_already;
      return compose(stand_ins);
    }();
    // A node that is one primitive is that primitive: its inputs may lend their memory.
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

  const char* const op_;
  const Graph graph_;
};

}  // namespace

bool traces_shapeless(std::initializer_list<const mx::array*> arrays) {
  // A graph that is being built has its shapes.
  return open_graphs == 0 &&
         std::any_of(arrays.begin(), arrays.end(),
                     [](const mx::array* x) { return x && x->is_tracer(); }) &&
         is_shapeless_trace();
}

Arrays shapeless_node(const char* op, mx::Stream stream, Arrays inputs, Graph graph) {
  auto node = std::make_shared<ShapelessNode>(stream, op, std::move(graph));
  const Arrays results = node->compose(without_numbers(inputs));
  if (!are_on(results, stream)) {
    throw_value_error(
        op,
        "the graph of MLX ops for this call runs on several devices, and "
        "mx.compile(shapeless=True) traces it; allowed: mx.compile without shapeless.");
  }
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& x : results) {
    shapes.push_back(x.shape());
    dtypes.push_back(x.dtype());
  }
  return mx::array::make_arrays(std::move(shapes), dtypes, node, inputs);
}

}  // namespace mlx_anvil

#include "common/primitive.h"

#include "common/trace.h"

namespace mlx_anvil {

namespace {

// `primals` with those at `argnums` replaced by `values`.
Arrays substitute(const Arrays& primals, const std::vector<int>& argnums, const Arrays& values) {
  Arrays all = primals;
  for (size_t i = 0; i < argnums.size(); ++i) {
    all[argnums[i]] = values[i];
  }
  return all;
}

Arrays select(const Arrays& primals, const std::vector<int>& argnums) {
  Arrays selected;
  for (int i : argnums) {
    selected.push_back(primals[i]);
  }
  return selected;
}

}  // namespace

void FusedPrimitive::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  if (!simulation_.on) {
    eval_native(inputs, outputs);
    return;
  }
  SimulationScope scope(simulation_);
  eval_gpu(inputs, outputs);
}

Arrays FusedPrimitive::vjp(const Arrays& primals,
                           const Arrays& cotangents,
                           const std::vector<int>& argnums,
                           const Arrays& outputs) {
  SimulationScope scope(simulation_);
  return gradient(primals, cotangents, argnums, outputs);
}

Arrays FusedPrimitive::jvp(const Arrays& primals,
                           const Arrays& tangents,
                           const std::vector<int>& argnums) {
  SimulationScope scope(simulation_);
  return tangent(primals, tangents, argnums);
}

std::pair<Arrays, std::vector<int>> FusedPrimitive::vmap(const Arrays& inputs,
                                                         const std::vector<int>& axes) {
  SimulationScope scope(simulation_);
  return batched(inputs, axes);
}

Arrays FusedPrimitive::gradient(const Arrays& primals,
                                const Arrays& cotangents,
                                const std::vector<int>& argnums,
                                const Arrays&) {
  note_fallback(op(), std::string("the gradient of ") + name() + " is a graph of MLX ops");
  auto of_selected = [&](const Arrays& values) {
    return compose(substitute(primals, argnums, values));
  };
  return mx::vjp(of_selected, select(primals, argnums), cotangents).second;
}

Arrays FusedPrimitive::tangent(const Arrays& primals,
                               const Arrays& tangents,
                               const std::vector<int>& argnums) {
  note_fallback(op(),
                std::string("the forward-mode derivative of ") + name() + " is a graph of MLX ops");
  auto of_selected = [&](const Arrays& values) {
    return compose(substitute(primals, argnums, values));
  };
  return mx::jvp(of_selected, select(primals, argnums), tangents).second;
}

std::pair<Arrays, std::vector<int>> FusedPrimitive::batched(const Arrays& inputs,
                                                            const std::vector<int>& axes) {
  note_fallback(op(), std::string("vmap of ") + name() + " is a graph of MLX ops");
  Arrays outputs = mx::vmap([this](const Arrays& in) { return compose(in); }, axes)(inputs);
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

Arrays batch_to_front(const Arrays& inputs, const std::vector<int>& axes, mx::Stream stream) {
  Arrays batched;
  for (size_t i = 0; i < inputs.size(); ++i) {
    batched.push_back(axes[i] < 0 ? mx::expand_dims(inputs[i], 0, stream)
                                  : mx::moveaxis(inputs[i], axes[i], 0, stream));
  }
  return mx::broadcast_arrays(batched, stream);
}

mx::array dense(mx::array x, mx::Stream stream) {
  const bool known = x.is_available() && !x.is_tracer() && x.flags().row_contiguous;
  return known ? x : mx::contiguous(x, false, stream);
}

mx::array output_of(std::shared_ptr<FusedPrimitive> primitive, mx::Dtype dtype, Arrays inputs) {
  mx::Shape shape = std::move(primitive->output_shapes(inputs)[0]);
  return mx::array(std::move(shape), dtype, std::move(primitive), std::move(inputs));
}

Arrays outputs_of(std::shared_ptr<FusedPrimitive> primitive,
                  const std::vector<mx::Dtype>& dtypes,
                  Arrays inputs) {
  if (dtypes.size() > 1) {  // MLX alone can tell them that they belong together
    return mx::array::make_arrays(primitive->output_shapes(inputs), dtypes, primitive, inputs);
  }
  Arrays outputs;
  outputs.push_back(output_of(std::move(primitive), dtypes[0], std::move(inputs)));
  return outputs;
}

}  // namespace mlx_anvil

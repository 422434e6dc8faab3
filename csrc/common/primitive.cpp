#include "common/primitive.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "common/block.h"
#include "common/freed_memory.h"
#include "common/launch.h"
#include "common/plan.h"
#include "common/select.h"
#include "common/trace.h"

namespace mlx_anvil {

namespace {

// Copies during an evaluation, by calling MLX's primitive directly. The array supplies the stream.
mx::array row_contiguous_copy(const mx::array& x, mx::Stream stream) {
  if (planning()) {
    return planned_array(x);
  }
  Arrays copy = {mx::contiguous(x, false, stream)};
  mx::Primitive& primitive = copy[0].primitive();
  if (stream.device == mx::Device::cpu) {
    primitive.eval_cpu({x}, copy);
  } else {
    primitive.eval_gpu({x}, copy);
  }
  return copy[0];
}

size_t bytes_of(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = size_of(dtype);
  for (const auto extent : shape) {
    bytes *= static_cast<size_t>(extent);
  }
  return bytes;
}

}  // namespace

// mx.export_function() ends its error with this name, up to a blank. The name therefore contains
// the remedy.
const char* FusedPrimitive::name() const {
  static std::mutex mutex;
  static std::map<std::string, std::string> names;
  std::lock_guard lock(mutex);
  std::string& text = names[kind()];
  if (text.empty()) {
    text = std::string("mlx_anvil.") + kind() + "(export_it_inside_mlx_anvil.composed())";
  }
  return text.c_str();
}

Arrays FusedPrimitive::dense_primals(const Arrays& primals) {
  Arrays dense = primals;
  for (size_t i = 0; i < dense.size(); ++i) {
    if (copies_primal(i) && !is_evaluated_dense(primals[i])) {
      dense[i] = mx::contiguous(primals[i], false, stream());
    }
  }
  return dense;
}

template <class Eval>
void FusedPrimitive::eval_dense(const Arrays& inputs, Eval eval) {
  Arrays all, copies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (wants_dense(i) && !inputs[i].flags().row_contiguous && !takes(i, inputs[i])) {
      all = all.empty() ? inputs : all;
      copies.push_back(row_contiguous_copy(inputs[i], stream()));
      all[i] = copies.back();
    }
  }
  if (copies.empty()) {
    eval(inputs);
    return;
  }
  try {
    eval(all);
  } catch (...) {  // the copies may not have run yet
    all.clear();
    keep_until_done(std::move(copies), stream());
    throw;
  }
  all.clear();
  keep_until_done(std::move(copies), stream());
}

void FusedPrimitive::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  if (!simulation_.on) {
    eval_dense(inputs, [&](const Arrays& in) { eval_cpu_kernels(in, outputs); });
    return;
  }
  SimulationScope scope(simulation_);
  eval_dense(inputs, [&](const Arrays& in) { eval_gpu_kernels(in, outputs); });
}

void FusedPrimitive::eval_gpu(const Arrays& inputs, Arrays& outputs) {
  eval_dense(inputs, [&](const Arrays& in) { eval_gpu_kernels(in, outputs); });
}

Arrays FusedPrimitive::vjp(const Arrays& primals,
                           const Arrays& cotangents,
                           const std::vector<int>& argnums,
                           const Arrays& outputs) {
  SimulationScope scope(simulation_);
  return gradient(dense_primals(primals), cotangents, argnums, outputs);
}

Arrays FusedPrimitive::jvp(const Arrays& primals,
                           const Arrays& tangents,
                           const std::vector<int>& argnums) {
  SimulationScope scope(simulation_);
  return tangent(dense_primals(primals), tangents, argnums);
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
  if (!composes_kernels()) {
    note_fallback(op(), std::string("the gradient of ") + kind() + " is a graph of MLX ops");
  }
  auto of_selected = [&](const Arrays& values) {
    return copy_repeated_results(compose(substitute(primals, argnums, values)), stream());
  };
  return mx::vjp(of_selected, select(primals, argnums), cotangents).second;
}

Arrays FusedPrimitive::tangent(const Arrays& primals,
                               const Arrays& tangents,
                               const std::vector<int>& argnums) {
  if (!composes_kernels()) {
    note_fallback(
        op(), std::string("the forward-mode derivative of ") + kind() + " is a graph of MLX ops");
  }
  auto of_selected = [&](const Arrays& values) {
    return compose(substitute(primals, argnums, values));
  };
  return mx::jvp(of_selected, select(primals, argnums), tangents).second;
}

std::pair<Arrays, std::vector<int>> FusedPrimitive::batched(const Arrays& inputs,
                                                            const std::vector<int>& axes) {
  if (!composes_kernels()) {
    note_fallback(op(), std::string("vmap of ") + kind() + " is a graph of MLX ops");
  }
  Arrays outputs = mx::vmap([this](const Arrays& in) { return compose(in); }, axes)(inputs);
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

Arrays copy_repeated_results(Arrays results, mx::Stream stream) {
  for (size_t i = 1; i < results.size(); ++i) {
    const auto is_result = [&](const mx::array& x) { return x.id() == results[i].id(); };
    if (std::any_of(results.begin(), results.begin() + static_cast<int64_t>(i), is_result)) {
      results[i] = mx::copy(results[i], stream);
    }
  }
  return results;
}

bool is_evaluated_dense(const mx::array& x) {
  return x.is_available() && !x.is_tracer() && x.flags().row_contiguous;
}

namespace {

// Returns true inside `composed()`, where the composition replaces the primitive.
bool is_composed(const FusedPrimitive& primitive) {
  const bool composed = composing();
  if (composed) {
    note_fallback(primitive.op(), "inside composed() every op is a graph of MLX ops");
  }
  return composed;
}

}  // namespace

mx::array output_of(std::shared_ptr<FusedPrimitive> primitive, mx::Dtype dtype, Arrays inputs) {
  if (is_composed(*primitive)) {
    return primitive->compose(inputs)[0];
  }
  mx::Shape shape = std::move(primitive->output_shapes(inputs)[0]);
  keep_freed_memory(bytes_of(shape, dtype), primitive->stream());
  return mx::array(std::move(shape), dtype, std::move(primitive), std::move(inputs));
}

Arrays outputs_of(std::shared_ptr<FusedPrimitive> primitive,
                  const std::vector<mx::Dtype>& dtypes,
                  Arrays inputs) {
  if (is_composed(*primitive)) {
    return primitive->compose(inputs);
  }
  if (dtypes.size() != 1) {  // MLX must know that several outputs have one primitive
    std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
    for (size_t i = 0; i < shapes.size(); ++i) {
      keep_freed_memory(bytes_of(shapes[i], dtypes[i]), primitive->stream());
    }
    return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
  }
  Arrays outputs;
  outputs.push_back(output_of(std::move(primitive), dtypes[0], std::move(inputs)));
  return outputs;
}

}  // namespace mlx_anvil

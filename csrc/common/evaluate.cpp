#include "common/evaluate.h"

#include <algorithm>
#include <memory>
#include <unordered_set>
#include <utility>

#include "common/launch.h"
#include "common/plan.h"
#include "common/trace.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_anvil {

namespace {

// Returns one output per unevaluated primitive behind `results`, inputs first.
Arrays topological_order(const Arrays& results) {
  Arrays order;
  std::unordered_set<std::uintptr_t> seen;
  std::vector<std::pair<mx::array, bool>> stack;  // true: all its inputs have been listed
  for (const mx::array& x : results) {
    stack.emplace_back(x, false);
  }
  while (!stack.empty()) {
    const auto [x, is_next] = std::move(stack.back());
    stack.pop_back();
    if (is_next) {
      order.push_back(x);
      continue;
    }
    if (!x.has_primitive() || x.status() != mx::array::Status::unscheduled || seen.count(x.id())) {
      continue;
    }
    for (const mx::array& output : x.outputs()) {
      seen.insert(output.id());
    }
    stack.emplace_back(x, true);
    for (const mx::array& input : x.inputs()) {
      stack.emplace_back(input, false);
    }
  }
  return order;
}

// Holds memory until the work that reads it is done, as MLX does after each primitive. The node's
// own memory is not held, so that the next node can reuse it.
void keep_memory_on_cpu(const mx::array& node, mx::Stream stream) {
  std::unordered_set<std::shared_ptr<mx::array::Data>> memory;
  for (const mx::array& input : node.inputs()) {
    memory.insert(input.data_shared_ptr());
  }
  for (const mx::array& sibling : node.siblings()) {
    memory.insert(sibling.data_shared_ptr());
  }
  memory.erase(node.data_shared_ptr());
  auto& encoder = mx::cpu::get_command_encoder(stream);
  encoder.dispatch(
      [memory = std::move(memory), temporaries = std::exchange(encoder.temporaries(), {})] {});
}

const void* memory_of(const mx::array& x) {
  return x.data_shared_ptr() ? x.buffer().ptr() : nullptr;
}

}  // namespace

void evaluate_primitive(mx::Primitive& primitive, const Arrays& inputs, Arrays& outputs) {
  if (primitive.stream().device == mx::Device::cpu) {
    primitive.eval_cpu(inputs, outputs);
  } else {
    primitive.eval_gpu(inputs, outputs);
  }
}

bool all_on_stream(const Arrays& results, mx::Stream stream) {
  const Arrays nodes = topological_order(results);
  return std::all_of(nodes.begin(), nodes.end(),
                     [stream](const mx::array& x) { return x.primitive().stream() == stream; });
}

void evaluate_graph(const Arrays& results, const Arrays& inputs, mx::Stream stream) {
  const bool on_cpu = stream.device == mx::Device::cpu;
  Arrays order = topological_order(results), read;
  for (mx::array& next : order) {
    mx::array node = std::move(next);  // `order` would keep its readers from reusing its memory
    {
      Arrays outputs = node.outputs();
      evaluate_primitive(node.primitive(), node.inputs(), outputs);
      for (const mx::array& output : outputs) {
        output.set_status(mx::array::Status::evaluated);
      }
    }
    if (on_cpu) {
      keep_memory_on_cpu(node, stream);
    } else {
      read.insert(read.end(), node.inputs().begin(), node.inputs().end());
      read.insert(read.end(), node.siblings().begin(), node.siblings().end());
    }
    node.detach();
  }
  if (on_cpu) {
    return;
  }
  // Later kernels do not wait for temporaries. Arrays that share memory with inputs or results must
  // therefore not become temporaries.
  std::unordered_set<const void*> shared;
  for (const Arrays* arrays : {&inputs, &results}) {
    for (const mx::array& x : *arrays) {
      shared.insert(memory_of(x));
    }
  }
  std::erase_if(read, [&](const mx::array& x) { return shared.count(memory_of(x)) > 0; });
  keep_until_done(std::move(read), stream);
}

Arrays evaluated(const std::function<Arrays(const Arrays&)>& graph,
                 const Arrays& inputs,
                 mx::Stream stream) {
  Arrays leaves;
  for (const mx::array& x : inputs) {
    leaves.emplace_back(x.shape(), x.dtype(), nullptr, Arrays{}).copy_shared_buffer(x);
  }
  Arrays results = graph(leaves);
  if (planning()) {  // MLX builds its own kernels
    std::transform(results.begin(), results.end(), results.begin(), planned_array);
  } else {
    evaluate_graph(results, leaves, stream);
  }
  return results;
}

void set_zeros(mx::array& output, mx::Stream stream) {
  if (planning()) {
    output.set_data(planned_memory());
    return;
  }
  const Arrays zeros = {mx::zeros(output.shape(), output.dtype(), stream)};
  evaluate_graph(zeros, {}, stream);
  output.copy_shared_buffer(zeros[0]);
}

void run_mlx_kernel(const char* op,
                    const MlxKernel& kernel,
                    const std::function<mx::array(const Arrays&)>& graph,
                    const Arrays& inputs,
                    mx::array& output,
                    mx::Stream stream) {
  if (planning()) {  // MLX builds its own kernels
    output.set_data(planned_memory());
    return;
  }
  note_mlx_kernel(op, kernel.name, kernel.reason, backend_name(stream.device));
  const auto one = [&graph](const Arrays& in) -> Arrays { return {graph(in)}; };
  output.copy_shared_buffer(evaluated(one, inputs, stream)[0]);
}

}  // namespace mlx_anvil

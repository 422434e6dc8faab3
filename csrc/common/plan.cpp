#include "common/plan.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "common/primitive.h"

namespace mlx_anvil {

namespace {

struct Plan {
  std::vector<PlannedKernel> kernels;
  std::set<std::tuple<const Kernel*, SimulatorChecks>> known;
};

thread_local Plan* current_plan = nullptr;

class PlanScope {
 public:
  explicit PlanScope(Plan* plan) : before_(std::exchange(current_plan, plan)) {}
  ~PlanScope() { current_plan = before_; }
  PlanScope(const PlanScope&) = delete;
  PlanScope& operator=(const PlanScope&) = delete;

 private:
  Plan* before_;
};

// Returns true for MLX's view primitives. Evaluating one only sets strides and an offset.
bool is_view(const mx::Primitive& primitive) {
  static constexpr std::array<std::string_view, 9> kViews = {
      "Transpose", "Broadcast", "BroadcastAxes",    "ExpandDims", "Squeeze",
      "Slice",     "Split",     "CustomTransforms", "Depends"};
  return std::find(kViews.begin(), kViews.end(), primitive.name()) != kViews.end();
}

// Walks a graph from its inputs to its outputs.
class Planner {
 public:
  // Plans everything that `output` depends on. Iterative, because graphs can be deep.
  void visit(const mx::array& output) {
    std::vector<mx::array> stack{output};
    while (!stack.empty()) {
      const mx::array x = stack.back();
      if (arrays_.count(x.id())) {
        stack.pop_back();
        continue;
      }
      if (x.status() != mx::array::Status::unscheduled || !x.has_primitive()) {
        arrays_.emplace(x.id(), x);
        stack.pop_back();
        continue;
      }
      const size_t waiting = stack.size();
      for (const mx::array& input : x.inputs()) {
        if (!arrays_.count(input.id())) {
          stack.push_back(input);
        }
      }
      if (stack.size() == waiting) {
        stack.pop_back();
        plan(x);
      }
    }
  }

 private:
  // Plans the primitive that produced `x` and adds all its outputs.
  void plan(const mx::array& x) {
    std::vector<mx::array> inputs;
    for (const mx::array& input : x.inputs()) {
      inputs.push_back(arrays_.at(input.id()));
    }
    std::vector<mx::array> outputs;
    const std::vector<mx::array> of_graph = x.outputs();
    for (const mx::array& output : of_graph) {
      outputs.emplace_back(output.shape(), output.dtype(), nullptr, std::vector<mx::array>{});
    }
    mx::Primitive& primitive = x.primitive();
    auto* fused = dynamic_cast<FusedPrimitive*>(&primitive);
    if (fused ? fused->launches_kernels() : is_view(primitive)) {
      if (primitive.stream().device == mx::Device::gpu) {
        primitive.eval_gpu(inputs, outputs);
      } else {
        primitive.eval_cpu(inputs, outputs);
      }
    } else {
      for (mx::array& output : outputs) {
        output.set_data(planned_memory());
      }
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      arrays_.emplace(of_graph[i].id(), std::move(outputs[i]));
    }
  }

  std::unordered_map<std::uintptr_t, mx::array> arrays_;  // by the id of the array they replace
};

}  // namespace

bool planning() {
  return current_plan != nullptr;
}

mx::allocator::Data planned_memory() {
  return mx::allocator::Data(mx::allocator::Buffer(nullptr), [](mx::allocator::Buffer) {});
}

mx::array planned_array(const mx::array& x) {
  mx::array planned(x.shape(), x.dtype(), nullptr, {});
  planned.set_data(planned_memory());
  return planned;
}

void plan_launch(const KernelLaunch& launch, const mx::Device& device) {
  const SimulationMode simulation = simulation_mode();
  if (current_plan->known.emplace(launch.kernel, simulation.checks).second) {
    current_plan->kernels.push_back({launch.kernel, device, simulation});
  }
}

void plan_graph(const std::vector<mx::array>& outputs) {
  Planner planner;
  for (const mx::array& output : outputs) {
    planner.visit(output);
  }
}

std::vector<PlannedKernel> plan_kernels(const std::vector<mx::array>& outputs) {
  Plan plan;
  PlanScope scope(&plan);
  plan_graph(outputs);
  return std::move(plan.kernels);
}

PipelineFacts build_pipeline(const PlannedKernel& planned) {
  if (planned.device == mx::Device::cpu) {
    return build_simulator(*planned.kernel, planned.simulation.checks);
  }
#if defined(MLX_ANVIL_METAL)
  return build_metal(*planned.kernel, planned.device);
#elif defined(MLX_ANVIL_CUDA)
  return build_cuda(*planned.kernel, planned.device);
#else
  return {};
#endif
}

}  // namespace mlx_anvil

#include "gated_delta/gates_gpu.h"

#include <algorithm>
#include <optional>

#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "gated_delta/gates_primitive.h"
#include "metal/gated_delta/params.h"

namespace mlx_anvil {

namespace {

constexpr uint32_t kGatesThreads = 256;

// Must match metal/common/sum_parts.h.
constexpr int64_t kGateSumColumns = 32;
constexpr uint32_t kGateSumThreads = 1024;

constexpr int64_t kEnoughGateThreads = 1 << 16;
constexpr int64_t kMostGateRows = 32;  // that a thread adds up one by one

// Indices as in metal/gated_delta/gates.h and gates_backward.metal.
enum GatesConstant : uint32_t { kLogIsFloat32, kBiasIsFloat32, kIsBounded, kWantsSums };

GatedDeltaGatesParams params_of(const GatesConfig& config, const Arrays& inputs) {
  const GatesSizes sizes(inputs);
  GatedDeltaGatesParams params{};
  params.rows = sizes.rows;
  params.heads = static_cast<int32_t>(sizes.heads);
  params.channels = static_cast<int32_t>(sizes.channels);
  params.lower_bound = config.lower_bound.value_or(0.0f);
  params.rate_scale = config.rate_scale;
  return params;
}

FunctionConstants constants_of(const GatesConfig& config, const Arrays& inputs) {
  return {{kLogIsFloat32, inputs[2].dtype() == mx::float32},
          {kBiasIsFloat32, inputs[3].dtype() == mx::float32},
          {kIsBounded, config.lower_bound.has_value()}};
}

// Adds up rows of `parts`, each with as many numbers as `sum`.
void launch_sum(const Scratch& parts, mx::array& sum, const mx::Stream& stream) {
  GatedDeltaGatesSumParams params{};
  params.columns = static_cast<uint32_t>(sum.size());
  params.parts = static_cast<uint32_t>(parts.get()->size() / sum.size());
  KernelLaunch request{};
  request.kernel = &kernel_named("gated_delta", {"gated_delta_gates_sum_", dtype_name(sum)}, {});
  request.inputs = {parts.get()};
  request.outputs = {&sum};
  request.temporaries = {&parts};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(ceil_div(int64_t{params.columns}, kGateSumColumns)), 1, 1};
  request.threadgroup = {kGateSumThreads, 1, 1};
  launch(request, stream);
}

}  // namespace

void gated_delta_gates_gpu(const GatesConfig& config,
                           const Arrays& inputs,
                           Arrays& outputs,
                           const mx::Stream& stream) {
  if (outputs[0].size() == 0) {
    return;
  }
  const GatedDeltaGatesParams params = params_of(config, inputs);
  KernelLaunch request{};
  request.kernel = &kernel_named("gated_delta", {"gated_delta_gates_", dtype_name(inputs[0])},
                                 constants_of(config, inputs));
  request.inputs = {&inputs[0], &inputs[1], &inputs[2], &inputs[3]};
  request.outputs = {&outputs[0], &outputs[1]};
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = linear_grid(static_cast<int64_t>(outputs[0].size()), kGatesThreads);
  request.threadgroup = {kGatesThreads, 1, 1};
  launch(request, stream);
}

void gated_delta_gates_backward_gpu(const GatesConfig& config,
                                    const Arrays& inputs,
                                    Arrays& outputs,
                                    const mx::Stream& stream) {
  const bool sums = outputs.size() > 2;
  if (inputs[3].size() == 0) {  // no heads
    return;
  }
  GatedDeltaGatesParams params = params_of(config, inputs);
  const int64_t columns = int64_t{params.heads} * params.channels;
  const int64_t blocks = ceil_div(columns, int64_t{kGateColumns});
  const int64_t rows_of_thread = std::clamp<int64_t>(
      params.rows * blocks * kGateColumns / kEnoughGateThreads, 1, kMostGateRows);
  params.rows_per_part = rows_of_thread * kGateSimdgroups;
  const int64_t parts = ceil_div(params.rows, params.rows_per_part);
  std::optional<Scratch> bias_parts, log_parts;
  if (sums) {
    const mx::Shape shape = {static_cast<int>(parts), static_cast<int>(columns)};
    bias_parts.emplace(shape, mx::float32, stream);
    log_parts.emplace(shape, mx::float32, stream);
  }
  if (parts > 0) {
    FunctionConstants constants = constants_of(config, inputs);
    constants.add({{kWantsSums, sums}});
    KernelLaunch request{};
    request.kernel = &kernel_named(
        "gated_delta", {"gated_delta_gates_backward_", dtype_name(inputs[0])}, constants);
    for (const mx::array& x : inputs) {
      request.inputs.push_back(&x);
    }
    request.outputs = {&outputs[0], &outputs[1], sums ? bias_parts->get() : &outputs[0],
                       sums ? log_parts->get() : &outputs[0]};
    if (sums) {
      request.temporaries = {&*bias_parts, &*log_parts};
    }
    request.params = &params;
    request.params_size = sizeof(params);
    request.grid = linear_grid(parts * blocks, 1);
    request.threadgroup = {kGatesThreads, 1, 1};
    launch(request, stream);
  }
  if (sums) {
    launch_sum(*log_parts, outputs[2], stream);
    launch_sum(*bias_parts, outputs[3], stream);
  }
}

}  // namespace mlx_anvil

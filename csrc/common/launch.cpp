#include "common/launch.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/plan.h"
#include "common/simulate.h"
#include "common/trace.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/backend/gpu/device_info.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kMaxGridX = 1 << 20;

std::string make_pipeline_key(const std::string& name,
                              const std::vector<FunctionConstant>& constants) {
  std::string key = name;
  for (const auto& [index, value] : constants) {
    key += "_c" + std::to_string(index) + (value ? "t" : "f");
  }
  return key;
}

// Describes the bindings for trace(), in order: dtype and direction of each array, size of the
// params, sizes of threadgroup memory. "=0" marks an array bound again in place of an absent one.
std::vector<std::string> describe_bindings(const KernelLaunch& launch) {
  std::vector<std::string> described;
  std::vector<const mx::array*> bound;
  // array.data() would move a CUDA array to host memory, away from the address that the enqueued
  // kernel will use.
  const auto describe = [&](const mx::array* x, const char* direction) {
    const auto same = std::find_if(bound.begin(), bound.end(), [&](const mx::array* other) {
      return other->buffer().ptr() == x->buffer().ptr() && other->offset() == x->offset();
    });
    described.push_back(to_text(x->dtype()) + direction +
                        (same == bound.end() ? "" : " =" + std::to_string(same - bound.begin())));
    bound.push_back(x);
  };
  for (const mx::array* x : launch.inputs) {
    describe(x, " in");
  }
  for (const mx::array* x : launch.outputs) {
    describe(x, " out");
  }
  if (launch.params_size > 0) {
    described.push_back("params " + std::to_string(launch.params_size));
  }
  for (uint32_t bytes : launch.threadgroup_memory) {
    described.push_back("threadgroup " + std::to_string(bytes));
  }
  return described;
}

// MLX's encoder orders no later kernel after a temporary. If an array of the graph were one, a
// later kernel could read or overwrite it too early.
void check_temporaries(const KernelLaunch& launch) {
  for (const Scratch* temporary : launch.temporaries) {
    if (!temporary->is_unshared()) {
      throw_internal_error(launch.kernel->op(),
                           launch.kernel->name() +
                               " received a temporary that is also held elsewhere; allowed: "
                               "memory that only this call uses.");
    }
  }
}

std::string device_text([[maybe_unused]] const Kernel& kernel, const mx::Device& device) {
#if defined(MLX_ANVIL_CUDA)
  if (device == mx::Device::gpu) {
    return cuda_device_text(kernel, device);
  }
#endif
  return backend_name(device);
}

}  // namespace

Kernel::Kernel(std::string op, std::string name, std::vector<FunctionConstant> constants)
    : op_(std::move(op)),
      name_(std::move(name)),
      constants_(std::move(constants)),
      pipeline_key_(make_pipeline_key(name_, constants_)) {}

const Kernel& kernel_named(const char* op,
                           const KernelName& name,
                           const FunctionConstants& constants) {
  struct Key {
    KernelName name;
    FunctionConstants constants;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const { return key.name.hash() ^ key.constants.hash(); }
  };
  static std::mutex mutex;
  static std::unordered_map<Key, Kernel, Hash> kernels;
  Key key{name, constants};
  std::lock_guard lock(mutex);
  if (auto known = kernels.find(key); known != kernels.end()) {
    return known->second;
  }
  return kernels.try_emplace(key, op, name.text(), constants.list()).first->second;
}

Extent linear_grid(int64_t items, int64_t per_threadgroup) {
  const int64_t groups = (items + per_threadgroup - 1) / per_threadgroup;
  const int64_t x = std::min(std::max<int64_t>(groups, 1), kMaxGridX);
  return {static_cast<uint32_t>(x), static_cast<uint32_t>((groups + x - 1) / x), 1};
}

bool can_launch(const mx::Device& device, std::string* why_not) {
  if (device == mx::Device::cpu) {
    *why_not = "kernels run on a CPU stream inside simulate() only";
    return simulation_mode().on;
  }
#if defined(MLX_ANVIL_METAL)
  *why_not = "MLX has no Metal device here";
  return mx::gpu::is_available();
#elif defined(MLX_ANVIL_CUDA)
  return can_launch_cuda(device, why_not);
#else
  *why_not = "this build of mlx-anvil has no kernels for MLX's GPU backend";
  return false;
#endif
}

bool launches_on_cuda(const mx::Device& device) {
#if defined(MLX_ANVIL_CUDA)
  std::string why_not;
  return device == mx::Device::gpu && can_launch_cuda(device, &why_not);
#else
  return false;
#endif
}

const char* backend_name(const mx::Device& device) {
  if (device == mx::Device::cpu) {
    return "simulator";
  }
#if defined(MLX_ANVIL_CUDA)
  return "cuda";
#else
  return "metal";
#endif
}

DeviceTraits device_traits(const mx::Device& device) {
  if (device == mx::Device::cpu) {
    const SimulationMode mode = simulation_mode();
    DeviceTraits traits = mode.matrix_units ? kHopperTraits : DeviceTraits{.apple = mode.apple};
    traits.group_products = mode.group_products;
    return traits;
  }
#if defined(MLX_ANVIL_CUDA)
  if (launches_on_cuda(device)) {
    return cuda_traits(device);
  }
#elif defined(MLX_ANVIL_METAL)
  return metal_traits();
#endif
  return {};
}

void keep_until_done(std::vector<mx::array> arrays, const mx::Stream& stream) {
  if (planning()) {
    return;
  }
  if (stream.device == mx::Device::cpu) {
    mx::cpu::get_command_encoder(stream).add_temporaries(std::move(arrays));
    return;
  }
#if defined(MLX_ANVIL_METAL)
  keep_until_done_metal(std::move(arrays), stream);
#elif defined(MLX_ANVIL_CUDA)
  keep_until_done_cuda(std::move(arrays), stream);
#endif
}

void launch(const KernelLaunch& request, const mx::Stream& stream) {
  std::string why_not;
  if (!can_launch(stream.device, &why_not)) {
    throw_internal_error(request.kernel->op(),
                         "cannot launch " + request.kernel->name() + ": " + why_not + ".");
  }
  if (planning()) {
    plan_launch(request, stream.device);
    return;
  }
  check_temporaries(request);
  if (stream.device == mx::Device::cpu) {
    launch_simulator(request, stream);
  } else {
#if defined(MLX_ANVIL_METAL)
    launch_metal(request, stream);
#elif defined(MLX_ANVIL_CUDA)
    launch_cuda(request, stream);
#endif
  }
  if (tracing()) {
    const Extent& grid = request.grid;
    const Extent& threads = request.threadgroup;
    record({TraceEvent::Kind::kKernel,
            request.kernel->op(),
            request.kernel->pipeline_key(),
            device_text(*request.kernel, stream.device),
            {grid.x, grid.y, grid.z},
            {threads.x, threads.y, threads.z},
            "",
            describe_bindings(request)});
  }
}

}  // namespace mlx_anvil

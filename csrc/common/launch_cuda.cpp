// launch() on MLX's CUDA backend. mslc compiles the same kernels to PTX.
#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "common/build_once.h"
#include "common/cuda_backend.h"
#include "common/cuda_module.h"
#include "common/errors.h"
#include "common/launch.h"

namespace mlx_anvil {

namespace {

constexpr size_t kMaxArguments = 32;
constexpr size_t kMaxParamsBytes = 1024;  // passed by value; must match shim/ptx/entry_ptx.h
constexpr uint32_t kMaxGridYz = 65535;    // limit of the y and z dimensions of a grid
// Dynamic shared memory that needs no opt-in: 48 KB per block, less the 32 KB that kernels may
// declare statically.
constexpr uint32_t kDefaultSharedBytes = 16 << 10;
constexpr size_t kSharedAlignment = 16;
constexpr int kSharedBytesOfSystem = 1 << 10;  // reserved by the driver, per block
constexpr int kMinCapability = 8;              // the PTX targets this architecture

// Values of the driver's enumerations of device and function attributes.
constexpr int kMultiprocessorCount = 16;
constexpr int kSharedBytesOfMultiprocessor = 81;
constexpr int kMaxDynamicSharedBytes = 8;
constexpr std::array<std::pair<const char*, int>, 4> kFacts = {{
    {"max_threads_per_threadgroup", 0},
    {"static_threadgroup_memory", 1},
    {"local_memory_per_thread", 3},
    {"registers_per_thread", 4},
}};

// A kernel's arguments. The driver takes their addresses in the order of the parameters.
class Arguments {
 public:
  Arguments(const KernelLaunch& launch, const LoadedKernel& kernel) {
    const size_t arrays = launch.inputs.size() + launch.outputs.size();
    const size_t offsets = std::max<size_t>(launch.threadgroup_memory.size(), 1) - 1;
    if (arrays + 1 > kMaxArguments || offsets > kMaxArguments ||
        launch.params_size > kMaxParamsBytes) {
      throw_internal_error(launch.kernel->op(),
                           launch.kernel->name() + " takes too many arguments.");
    }
    std::array<void*, kMaxArguments> bound{};
    size_t count = 0;
    const auto bind_array = [&](const mx::array& x) {
      pointers_[count] = device_address(x);
      bound[count] = &pointers_[count];
      ++count;
    };
    for (const mx::array* input : launch.inputs) {
      bind_array(*input);
    }
    for (const mx::array* output : launch.outputs) {
      bind_array(*output);
    }
    if (launch.params_size > 0) {
      bound[count++] = const_cast<void*>(launch.params);
    }
    if (kernel.bindings.size() < offsets) {
      throw_internal_error(
          launch.kernel->op(),
          launch.kernel->name() + " has fewer parameters than threadgroup buffers.");
    }
    const size_t bindings = kernel.bindings.size() - offsets;
    for (size_t i = 0; i < bindings; ++i) {
      if (kernel.bindings[i] >= count) {
        throw_internal_error(launch.kernel->op(), launch.kernel->name() +
                                                      " received no argument for binding " +
                                                      std::to_string(kernel.bindings[i]) + ".");
      }
      addresses_[i] = bound[kernel.bindings[i]];
    }
    // All threadgroup buffers share one block. The kernel receives the offsets of all but the
    // first.
    for (size_t i = 0; i < launch.threadgroup_memory.size(); ++i) {
      if (i > 0) {
        offsets_[i - 1] = shared_bytes_;
        addresses_[bindings + i - 1] = &offsets_[i - 1];
      }
      const size_t bytes = launch.threadgroup_memory[i] + kSharedAlignment - 1;
      shared_bytes_ += static_cast<uint32_t>(bytes / kSharedAlignment * kSharedAlignment);
    }
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  void** get() { return addresses_.data(); }
  uint32_t shared_bytes() const { return shared_bytes_; }

 private:
  std::array<void*, 2 * kMaxArguments> addresses_{};
  std::array<void*, kMaxArguments> pointers_{};
  std::array<uint32_t, kMaxArguments> offsets_{};
  uint32_t shared_bytes_ = 0;
};

// The limit only grows: launches recorded in a CUDA graph with more memory would fail otherwise.
void allow_shared_bytes(const Kernel& kernel, const LoadedKernel& loaded, uint32_t bytes) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (bytes <= loaded.most_shared_bytes) {
    return;
  }
  if (const int result = cuda_driver()->set_function_attribute(
          loaded.function, kMaxDynamicSharedBytes, static_cast<int>(bytes))) {
    throw_driver_error(kernel, "threadgroup memory of", result);
  }
  loaded.most_shared_bytes = bytes;
}

dim3 to_dim3(const Extent& extent) {
  return {extent.x, extent.y, extent.z};
}

}  // namespace

bool can_launch_cuda(const mx::Device& device, std::string* why_not) {
  // Called several times per launch, so a positive answer is cached as one bit per device.
  static std::atomic<uint64_t> usable{0};
  const uint64_t bit = uint64_t{1} << (device.index % 64);
  if (device.index < 64 && (usable.load(std::memory_order_relaxed) & bit)) {
    return true;
  }
  if (!mlx_has_cuda() || !mx::is_available(device) || !cuda_driver()) {
    *why_not = "MLX has no CUDA device here";
    return false;
  }
  if (!has_cuda_modules()) {
    *why_not = "this build of mlx-anvil has no PTX (docs/cuda.md)";
    return false;
  }
  if (compute_capability(device.index).major < kMinCapability) {
    *why_not = "the kernels need compute capability 8.0 (Ampere) or newer";
    return false;
  }
  usable.fetch_or(bit, std::memory_order_relaxed);
  return true;
}

DeviceTraits cuda_traits(const mx::Device& device) {
  static BuildOnce<int, DeviceTraits> all;
  return all.get(device.index, [&] {
    const ComputeCapability capability = compute_capability(device.index);
    return DeviceTraits{
        .matrix_units = true,
        .group_products = capability.major == 9 && capability.minor == 0,
        .multiprocessors = device_attribute(device.index, kMultiprocessorCount),
        .threadgroup_memory =
            device_attribute(device.index, kSharedBytesOfMultiprocessor) - kSharedBytesOfSystem,
    };
  });
}

std::string cuda_device_text(const Kernel& kernel, const mx::Device& device) {
  const std::string& architecture = loaded_kernel(kernel, device.index).architecture;
  return architecture.empty() ? "cuda" : "cuda (" + architecture + ")";
}

void launch_cuda(const KernelLaunch& launch, const mx::Stream& stream) {
  const Kernel& kernel = *launch.kernel;
  if (launch.grid.y > kMaxGridYz || launch.grid.z > kMaxGridYz) {
    throw_internal_error(kernel.op(),
                         kernel.name() + " needs a grid of more than 65535 in y or z.");
  }
  const LoadedKernel& loaded = loaded_kernel(kernel, stream.device.index);
  Arguments arguments(launch, loaded);
  if (arguments.shared_bytes() > kDefaultSharedBytes) {
    allow_shared_bytes(kernel, loaded, arguments.shared_bytes());
  }
  auto& encoder = mx::cu::get_command_encoder(stream);
  for (const mx::array* input : launch.inputs) {
    encoder.set_input_array(*input);
  }
  if (launch.after) {
    encoder.set_input_array(*launch.after);
  }
  for (const mx::array* output : launch.outputs) {
    encoder.set_output_array(*output);
  }
  encoder.add_kernel_node_raw(loaded.function, to_dim3(launch.grid), to_dim3(launch.threadgroup),
                              {0, 0, 0}, arguments.shared_bytes(), arguments.get());
}

PipelineFacts build_cuda(const Kernel& kernel, const mx::Device& device) {
  mx::cu::device(device.index).make_current();  // for the calling thread
  const LoadedKernel& loaded = loaded_kernel(kernel, device.index);
  PipelineFacts facts;
  for (const auto& [name, attribute] : kFacts) {
    int value = 0;
    if (cuda_driver()->function_attribute(&value, attribute, loaded.function) == 0) {
      facts[name] = static_cast<uint64_t>(value);
    }
  }
  return facts;
}

void keep_until_done_cuda(std::vector<mx::array> arrays, const mx::Stream& stream) {
  mx::cu::get_command_encoder(stream).add_completed_handler([kept = std::move(arrays)] {});
}

}  // namespace mlx_anvil

// launch() on Metal. The only file that includes a Metal header. Compiled if MLX was built with
// Metal.
#include <dlfcn.h>
#include <mach-o/loader.h>

#include <filesystem>
#include <string>

#include "common/errors.h"
#include "common/kernel_source.h"
#include "common/launch.h"
#include "mlx/backend/metal/device.h"
#include "mlx/backend/metal/metal.h"

namespace mlx_anvil {

namespace {

// mlx_anvil.metallib is installed next to the extension module.
std::string metallib_path() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<const void*>(&metallib_path), &info) || !info.dli_fname) {
    return "";
  }
  const auto path = std::filesystem::path(info.dli_fname).parent_path() / "mlx_anvil.metallib";
  std::error_code error;
  return std::filesystem::exists(path, error) ? path.string() : "";
}

// Returns the compiled metallib if the package has one. Otherwise MLX compiles this kernel's
// embedded source, once per process. MLX caches both libraries by name.
MTL::Library* library_for(mx::metal::Device& device, const Kernel& kernel) {
  static const std::string metallib = metallib_path();
  if (!metallib.empty()) {
    return device.get_library("mlx_anvil", metallib);
  }
  const std::string& name = kernel.name();
  return device.get_library("mlx_anvil_" + name, [&name] { return kernel_source(name); });
}

MTL::ComputePipelineState* pipeline_for(mx::metal::Device& device, const Kernel& kernel) {
  mx::metal::MTLFCList constants;
  for (const FunctionConstant& constant : kernel.constants()) {
    constants.emplace_back(&constant.value, MTL::DataType::DataTypeBool, constant.index);
  }
  // MLX caches pipelines by hash name, so it must distinguish the specialisations of a kernel.
  return device.get_kernel(kernel.name(), library_for(device, kernel), kernel.pipeline_key(),
                           constants);
}

// MLX builds its kernels for neural accelerators only if the oldest macOS that the build supports
// is 26.2 or newer, as in its wheels for macOS 26. libmlx's header says which one that is.
bool mlx_has_neural_kernels() {
  constexpr uint32_t kMacos26_2 = 26 << 16 | 2 << 8;
  Dl_info info;
  mx::metal::Device& (*in_libmlx)(mx::Device) = &mx::metal::device;
  if (!dladdr(reinterpret_cast<const void*>(in_libmlx), &info) || !info.dli_fbase) {
    return false;
  }
  const auto* header = static_cast<const mach_header_64*>(info.dli_fbase);
  if (header->magic != MH_MAGIC_64) {
    return false;
  }
  const char* at = reinterpret_cast<const char*>(header + 1);
  for (uint32_t i = 0; i < header->ncmds; ++i) {
    const auto* command = reinterpret_cast<const load_command*>(at);
    if (command->cmd == LC_BUILD_VERSION) {
      return reinterpret_cast<const build_version_command*>(at)->minos >= kMacos26_2;
    }
    at += command->cmdsize;
  }
  return false;
}

MTL::Size size_of_extent(const Extent& extent) {
  return MTL::Size(extent.x, extent.y, extent.z);
}

}  // namespace

void launch_metal(const KernelLaunch& launch, const mx::Stream& stream) {
  auto& device = mx::metal::device(stream.device);
  auto& encoder = mx::metal::get_command_encoder(stream);
  MTL::ComputePipelineState* pipeline = pipeline_for(device, *launch.kernel);

  const Extent& threads = launch.threadgroup;
  const size_t thread_count = size_t{threads.x} * threads.y * threads.z;
  if (thread_count > pipeline->maxTotalThreadsPerThreadgroup()) {
    throw_internal_error(launch.kernel->op(),
                         launch.kernel->name() + " needs " + std::to_string(thread_count) +
                             " threads per threadgroup; this GPU allows it " +
                             std::to_string(pipeline->maxTotalThreadsPerThreadgroup()) + ".");
  }

  encoder.set_compute_pipeline_state(pipeline);
  int binding = 0;
  for (const mx::array* input : launch.inputs) {
    encoder.set_input_array(*input, binding++);
  }
  for (mx::array* output : launch.outputs) {
    encoder.set_output_array(*output, binding++);
  }
  if (launch.params_size > 0) {
    encoder.set_bytes(static_cast<const char*>(launch.params), static_cast<int>(launch.params_size),
                      binding++);
  }
  for (size_t i = 0; i < launch.threadgroup_memory.size(); ++i) {
    encoder.set_threadgroup_memory_length(launch.threadgroup_memory[i], static_cast<int>(i));
  }
  encoder.dispatch_threadgroups(size_of_extent(launch.grid), size_of_extent(launch.threadgroup));
}

PipelineFacts build_metal(const Kernel& kernel, const mx::Device& device) {
  MTL::ComputePipelineState* pipeline = pipeline_for(mx::metal::device(device), kernel);
  return {{"max_threads_per_threadgroup", pipeline->maxTotalThreadsPerThreadgroup()},
          {"static_threadgroup_memory", pipeline->staticThreadgroupMemoryLength()},
          {"thread_execution_width", pipeline->threadExecutionWidth()}};
}

DeviceTraits metal_traits() {
  static const DeviceTraits traits = [] {
    AppleGpu gpu = apple_gpu(gpu_fact("architecture"), gpu_fact("device_name"));
    gpu.neural_accelerators = gpu.neural_accelerators && mlx_has_neural_kernels();
    return DeviceTraits{.apple = gpu};
  }();
  return traits;
}

void keep_until_done_metal(std::vector<mx::array> arrays, const mx::Stream& stream) {
  mx::metal::get_command_encoder(stream).add_temporaries(std::move(arrays));
}

}  // namespace mlx_anvil

// launch() on MLX's CUDA backend: the same kernels as PTX, which mslc made of them.
#include <array>
#include <cctype>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "common/cuda_backend.h"
#include "common/errors.h"
#include "common/launch.h"

namespace mlx_anvil {

namespace {

constexpr size_t kMostArguments = 32;
constexpr size_t kLargestParams = 1024;              // by value; shim/ptx/entry_ptx.h has the same
constexpr uint32_t kMostBlocksInYz = 65535;          // of a grid
constexpr uint32_t kSharedWithoutAsking = 48 << 10;  // bytes of a block
constexpr size_t kSharedAlignment = 16;
constexpr int kLeastCapability = 8;  // the architecture that the PTX is made for

// Values of the driver's enumerations.
constexpr int kComputeCapabilityMajor = 75;
constexpr int kMaxDynamicSharedBytes = 8;
constexpr int kJitErrorLog = 5;
constexpr int kJitErrorLogSize = 6;

std::mutex source_mutex;
PtxSource registered_source;

PtxSource ptx_source() {
  std::lock_guard lock(source_mutex);
  return registered_source;
}

[[noreturn]] void throw_driver_error(const Kernel& kernel, const char* doing, int result) {
  const char* text = nullptr;
  cuda_driver()->error_text(result, &text);
  throw_internal_error(kernel.op(), std::string(doing) + " " + kernel.pipeline_key() + ": " +
                                        (text ? text : "unknown CUDA error") + ".");
}

// The kernel's text with a value in place of every function constant, for the assembler to fold.
std::string specialised(const Kernel& kernel, const std::string& text) {
  constexpr std::string_view kName = "mslc_function_constant_";
  std::string result;
  result.reserve(text.size());
  size_t done = 0;
  for (size_t at = text.find(kName); at != std::string::npos; at = text.find(kName, done)) {
    result.append(text, done, at - done);
    uint32_t index = 0;
    for (done = at + kName.size(); done < text.size() && std::isdigit(text[done]); ++done) {
      index = index * 10 + static_cast<uint32_t>(text[done] - '0');
    }
    const FunctionConstant* given = nullptr;
    for (const FunctionConstant& constant : kernel.constants()) {
      given = constant.index == index ? &constant : given;
    }
    if (!given) {
      throw_internal_error(kernel.op(), kernel.pipeline_key() +
                                            " has no value for function constant " +
                                            std::to_string(index) + ".");
    }
    result += given->value ? '1' : '0';
  }
  return result.append(text, done, std::string::npos);
}

// Assembled for the GPU by the driver, which keeps what it made in a cache of its own on disk.
CUfunction load(const Kernel& kernel) {
  const CudaDriver& driver = *cuda_driver();
  const std::string text = specialised(kernel, ptx_source()(kernel));
  std::array<char, 4096> log{};
  int options[] = {kJitErrorLog, kJitErrorLogSize};
  void* values[] = {log.data(), reinterpret_cast<void*>(log.size())};
  CUmodule module = nullptr;
  if (const int result = driver.module_load(&module, text.c_str(), 2, options, values)) {
    throw_driver_error(kernel, (std::string("loading (") + log.data() + ")").c_str(), result);
  }
  CUfunction function = nullptr;
  if (const int result = driver.module_function(&function, module, kernel.name().c_str())) {
    throw_driver_error(kernel, "finding", result);
  }
  return function;
}

// Loaded once per device, where the calling thread's CUDA context is (MLX sets it), and kept.
CUfunction function_of(const Kernel& kernel, int device) {
  using Key = std::pair<const Kernel*, int>;
  static std::mutex mutex;
  static std::map<Key, CUfunction> functions;
  const Key key{&kernel, device};
  {
    std::lock_guard lock(mutex);
    if (auto known = functions.find(key); known != functions.end()) {
      return known->second;
    }
  }
  // Without the lock: the source takes Python's lock, whose holder may be waiting for ours.
  CUfunction function = load(kernel);
  std::lock_guard lock(mutex);
  return functions.try_emplace(key, function).first->second;
}

// The addresses of a kernel's arguments, in the order of its parameters.
class Arguments {
 public:
  explicit Arguments(const KernelLaunch& launch) {
    const size_t buffers = launch.threadgroup_memory.size();
    const size_t arrays = launch.inputs.size() + launch.outputs.size();
    if (arrays + buffers + 1 > kMostArguments || launch.params_size > kLargestParams) {
      throw_internal_error(launch.kernel->op(),
                           launch.kernel->name() + " takes too many arguments.");
    }
    for (const mx::array* input : launch.inputs) {
      add_address(device_address(*input));
    }
    for (const mx::array* output : launch.outputs) {
      add_address(device_address(*output));
    }
    if (launch.params_size > 0) {
      addresses_[count_++] = const_cast<void*>(launch.params);
    }
    // All threadgroup buffers lie in one block; the kernel is told where those after the first do.
    for (size_t i = 0; i < buffers; ++i) {
      if (i > 0) {
        offsets_[i] = shared_bytes_;
        addresses_[count_++] = &offsets_[i];
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
  void add_address(void* address) {
    pointers_[count_] = address;
    addresses_[count_] = &pointers_[count_];
    ++count_;
  }

  std::array<void*, kMostArguments> addresses_{};
  std::array<void*, kMostArguments> pointers_{};
  std::array<uint32_t, kMostArguments> offsets_{};
  size_t count_ = 0;
  uint32_t shared_bytes_ = 0;
};

dim3 to_dim3(const Extent& extent) {
  return {extent.x, extent.y, extent.z};
}

// Of a device whose MLX stream is in use; asked once for each.
int compute_capability(int device) {
  static std::mutex mutex;
  static std::map<int, int> known;
  std::lock_guard lock(mutex);
  const auto [found, fresh] = known.try_emplace(device, 0);
  if (fresh) {
    cuda_driver()->device_attribute(&found->second, kComputeCapabilityMajor, device);
  }
  return found->second;
}

}  // namespace

void set_ptx_source(PtxSource source) {
  std::lock_guard lock(source_mutex);
  registered_source = std::move(source);
}

bool can_launch_cuda(const mx::Device& device, std::string* why_not) {
  if (!mlx_has_cuda() || !mx::is_available(device) || !cuda_driver()) {
    *why_not = "MLX has no CUDA device here";
    return false;
  }
  if (!ptx_source()) {
    *why_not = "this build of mlx-anvil has no PTX (docs/backends.md)";
    return false;
  }
  if (compute_capability(device.index) < kLeastCapability) {
    *why_not = "the kernels need compute capability 8.0 (Ampere) or newer";
    return false;
  }
  return true;
}

void launch_cuda(const KernelLaunch& launch, const mx::Stream& stream) {
  const Kernel& kernel = *launch.kernel;
  if (launch.grid.y > kMostBlocksInYz || launch.grid.z > kMostBlocksInYz) {
    throw_internal_error(kernel.op(),
                         kernel.name() + " needs a grid of more than 65535 in y or z.");
  }
  CUfunction function = function_of(kernel, stream.device.index);
  Arguments arguments(launch);
  if (arguments.shared_bytes() > kSharedWithoutAsking) {
    const int bytes = static_cast<int>(arguments.shared_bytes());
    if (const int result =
            cuda_driver()->function_attribute(function, kMaxDynamicSharedBytes, bytes)) {
      throw_driver_error(kernel, "threadgroup memory of", result);
    }
  }
  auto& encoder = mx::cu::get_command_encoder(stream);
  for (const mx::array* input : launch.inputs) {
    encoder.set_input_array(*input);
  }
  for (const mx::array* output : launch.outputs) {
    encoder.set_output_array(*output);
  }
  encoder.add_kernel_node_raw(function, to_dim3(launch.grid), to_dim3(launch.threadgroup),
                              {0, 0, 0}, arguments.shared_bytes(), arguments.get());
  if (!launch.temporaries.empty()) {
    encoder.add_completed_handler([kept = launch.temporaries] {});
  }
}

}  // namespace mlx_anvil

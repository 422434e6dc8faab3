#include "common/cuda_module.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/build_once.h"
#include "common/errors.h"

namespace mlx_anvil {

namespace {

// Values of the driver's enumerations.
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kJitErrorLog = 5;
constexpr int kJitErrorLogSize = 6;

std::mutex modules_mutex;
CudaModules registered_modules;

CudaModules cuda_modules() {
  std::lock_guard lock(modules_mutex);
  return registered_modules;
}

// Replaces every function constant in the PTX by its value, so that the assembler can fold it. One
// with the suffix _keeps_N becomes N if it is true, and 1 if not.
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
    constexpr std::string_view kSuffix = "_keeps_";
    if (text.compare(done, kSuffix.size(), kSuffix) != 0) {
      result += given->value ? '1' : '0';
      continue;
    }
    const size_t number = done + kSuffix.size();  // of resident threadgroups
    done = text.find_first_not_of("0123456789", number);
    result += given->value ? text.substr(number, done - number) : "1";
  }
  return result.append(text, done, std::string::npos);
}

// Removes the first line and returns the bindings that it lists. The image then starts where the
// string does, at a multiple of 16 bytes: the driver requires that alignment for its headers.
std::vector<uint8_t> take_bindings(std::string& module) {
  constexpr std::string_view kPrefix = "// bindings";
  const size_t end = std::min(module.find('\n'), module.size());
  const char *at = module.data() + std::min(kPrefix.size(), end), *last = module.data() + end;
  std::vector<uint8_t> bindings;
  for (unsigned index = 0; at < last && *at == ' ';) {
    const auto [next, error] = std::from_chars(at + 1, last, index);
    if (error != std::errc()) {
      break;
    }
    bindings.push_back(static_cast<uint8_t>(index));
    at = next;
  }
  module.erase(0, end + (end < module.size()));
  return bindings;
}

// Returns null if the package has no cubin for this device, or if the driver rejects it because it
// is older than the assembler that made it.
CUmodule load_cubin(const Kernel& kernel, int device, LoadedKernel& loaded) {
  Cubin cubin = cuda_modules().cubin(kernel, compute_capability(device));
  if (cubin.image.empty()) {
    return nullptr;
  }
  std::vector<uint8_t> bindings = take_bindings(cubin.image);
  CUmodule module = nullptr;
  if (cuda_driver()->module_load(&module, cubin.image.data(), 0, nullptr, nullptr)) {
    return nullptr;
  }
  loaded.bindings = std::move(bindings);
  loaded.architecture = std::move(cubin.architecture);
  return module;
}

// The driver assembles the PTX for the GPU and caches the result on disk.
CUmodule load_ptx(const Kernel& kernel, LoadedKernel& loaded) {
  std::string text = specialised(kernel, cuda_modules().ptx(kernel));
  loaded.bindings = take_bindings(text);
  std::array<char, 4096> log{};
  int options[] = {kJitErrorLog, kJitErrorLogSize};
  void* values[] = {log.data(), reinterpret_cast<void*>(log.size())};
  CUmodule module = nullptr;
  if (const int result = cuda_driver()->module_load(&module, text.c_str(), 2, options, values)) {
    throw_driver_error(kernel, (std::string("loading (") + log.data() + ")").c_str(), result);
  }
  return module;
}

LoadedKernel load(const Kernel& kernel, int device) {
  LoadedKernel loaded;
  CUmodule module = load_cubin(kernel, device, loaded);
  if (!module) {
    module = load_ptx(kernel, loaded);
  }
  const char* name = kernel.name().c_str();
  if (const int result = cuda_driver()->module_function(&loaded.function, module, name)) {
    throw_driver_error(kernel, "finding", result);
  }
  return loaded;
}

}  // namespace

int device_attribute(int device, int attribute) {
  int value = 0;
  cuda_driver()->device_attribute(&value, attribute, device);
  return value;
}

ComputeCapability compute_capability(int device) {
  return {device_attribute(device, kComputeCapabilityMajor),
          device_attribute(device, kComputeCapabilityMinor)};
}

void set_cuda_modules(CudaModules modules) {
  std::lock_guard lock(modules_mutex);
  registered_modules = std::move(modules);
}

bool has_cuda_modules() {
  return cuda_modules().ptx != nullptr;
}

const LoadedKernel& loaded_kernel(const Kernel& kernel, int device) {
  static BuildOnce<std::pair<const Kernel*, int>, LoadedKernel> all;
  return all.get({&kernel, device}, [&] { return load(kernel, device); });
}

void throw_driver_error(const Kernel& kernel, const char* doing, int result) {
  const char* text = nullptr;
  cuda_driver()->error_text(result, &text);
  throw_internal_error(kernel.op(), std::string(doing) + " " + kernel.pipeline_key() + ": " +
                                        (text ? text : "unknown CUDA error") + ".");
}

}  // namespace mlx_anvil

// launch() in the Metal simulator: the same kernels, bindings, params and grid, on the CPU stream.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "common/errors.h"
#include "common/simulate.h"
#include "mlx/backend/cpu/encoder.h"
#include "python/mlx_anvil/mslc/runtime/abi.h"

namespace mlx_anvil {

namespace {

// Synchronisation points and unbounded loop steps that a threadgroup may make before it counts as
// hung.
constexpr unsigned long long kStepLimit = 200'000'000;

thread_local SimulationMode current_mode;

std::mutex compiler_mutex;
SimulatorCompiler compile_library;

// A library that mslc compiled, loaded for the life of the process.
class SimulatorLibrary {
 public:
  SimulatorLibrary(const std::string& op, const std::string& path) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle_) {
      throw_internal_error(op, std::string("the simulator cannot load ") + path + ": " + dlerror());
    }
    // Found through the kernel library, which is linked with the runtime.
    run = symbol<decltype(run)>(op, "mslc_run");
    clear_report = symbol<decltype(clear_report)>(op, "mslc_report_clear");
    const auto version = symbol<unsigned int (*)()>(op, "mslc_abi_version");
    if (version() != MSLC_ABI_VERSION) {
      throw_internal_error(op, "the simulator's runtime is of another version: " + path);
    }
    kernels_ = symbol<mslc_kernels_function>(op, "mslc_kernels")(&count_);
  }

  const mslc_kernel& find(const Kernel& kernel) const {
    const auto* found = std::find_if(kernels_, kernels_ + count_,
                                     [&](const mslc_kernel& k) { return kernel.name() == k.name; });
    if (found == kernels_ + count_) {
      throw_internal_error(kernel.op(), "there is no kernel " + kernel.name() + ".");
    }
    return *found;
  }

  int (*run)(const mslc_launch*, mslc_report*) = nullptr;
  void (*clear_report)(mslc_report*) = nullptr;

 private:
  template <class Function>
  Function symbol(const std::string& op, const char* name) {
    void* address = dlsym(handle_, name);
    if (!address) {
      throw_internal_error(op, std::string("the simulator lacks ") + name + ".");
    }
    return reinterpret_cast<Function>(address);
  }

  void* handle_ = nullptr;
  const mslc_kernel* kernels_ = nullptr;
  unsigned int count_ = 0;
};

const SimulatorLibrary& library_for(const Kernel& kernel, bool checked) {
  using Key = std::tuple<std::string, std::vector<std::pair<uint32_t, bool>>, bool>;
  static std::mutex mutex;
  static std::map<Key, SimulatorLibrary> libraries;
  Key key{kernel.op(), {}, checked};
  for (const FunctionConstant& constant : kernel.constants()) {
    std::get<1>(key).emplace_back(constant.index, constant.value);
  }
  {
    std::lock_guard lock(mutex);
    if (auto known = libraries.find(key); known != libraries.end()) {
      return known->second;
    }
  }
  // Without the lock: the compiler takes Python's lock, whose holder may be waiting for ours.
  SimulatorCompiler compile;
  {
    std::lock_guard lock(compiler_mutex);
    compile = compile_library;
  }
  if (!compile) {
    throw_internal_error(kernel.op(), "the simulator has no compiler: use mlx_anvil.simulate().");
  }
  SimulatorLibrary library(kernel.op(), compile(kernel.op(), kernel.constants(), checked));
  std::lock_guard lock(mutex);
  return libraries.try_emplace(std::move(key), std::move(library)).first->second;
}

// What a kernel may touch of an array: bytes relative to its first element. Views that run
// backwards reach below it.
struct Reach {
  int64_t low = 0;
  int64_t high = 0;
};

Reach reach_of(const mx::array& x) {
  if (x.size() == 0) {
    return {};
  }
  Reach reach;
  for (size_t axis = 0; axis < x.ndim(); ++axis) {
    const int64_t span = x.strides()[axis] * (x.shape()[axis] - 1);
    (span < 0 ? reach.low : reach.high) += span;
  }
  const auto itemsize = static_cast<int64_t>(x.itemsize());
  return {reach.low * itemsize, (reach.high + 1) * itemsize};
}

// A copy of an array's memory for one launch. A GPU's buffers start at page boundaries, and kernels
// build on that; MLX's memory on the CPU starts 8 bytes behind a multiple of 16. The copy lies as
// the array would in a buffer on a GPU, and has nothing of ours around it.
class DeviceCopy {
 public:
  DeviceCopy(const mx::array& x, bool is_output)
      : host_(const_cast<char*>(x.data<char>())), reach_(reach_of(x)), is_output_(is_output) {
    offset_ = static_cast<size_t>((x.offset() % kPage + kPage + reach_.low % kPage) % kPage);
  }

  char* host() const { return host_; }
  bool is_output() const { return is_output_; }
  void mark_output() { is_output_ = true; }

  mslc_buffer upload() {
    const size_t bytes = offset_ + static_cast<size_t>(reach_.high - reach_.low);
    block_.reset(static_cast<char*>(std::aligned_alloc(kPage, (bytes / kPage + 1) * kPage)));
    first_ = block_.get() + offset_ - reach_.low;
    std::memcpy(first_ + reach_.low, host_ + reach_.low, reach_.high - reach_.low);
    return {first_, static_cast<unsigned long long>(reach_.high)};
  }

  void download() const {
    std::memcpy(host_ + reach_.low, first_ + reach_.low, reach_.high - reach_.low);
  }

 private:
  static constexpr int64_t kPage = 4096;
  struct Free {
    void operator()(char* block) const { std::free(block); }
  };

  char* host_;
  Reach reach_;
  bool is_output_;
  size_t offset_ = 0;
  std::unique_ptr<char, Free> block_;
  char* first_ = nullptr;
};

std::string findings_text(const mslc_report& report) {
  std::string text;
  for (unsigned int i = 0; i < report.finding_count; ++i) {
    const mslc_finding& f = report.findings[i];
    text += "\n  ";
    if (f.file) {
      text += std::string(f.file) + ":" + std::to_string(f.line) + ":" + std::to_string(f.column) +
              ": ";
    }
    text += f.message;
    if (f.thread_index >= 0) {
      text += " (thread " + std::to_string(f.thread_index) + ")";
    }
  }
  return text;
}

mslc_size to_size(const Extent& extent) {
  return {extent.x, extent.y, extent.z};
}

// Everything that a launch needs once the arrays of the KernelLaunch are gone. MLX keeps their
// memory alive until the task has run.
struct Task {
  const SimulatorLibrary* library;
  const mslc_kernel* kernel;
  std::string op;
  std::vector<DeviceCopy> arrays;
  std::vector<size_t> bindings;  // index into arrays: an output may lie in an input's memory
  std::vector<char> params;
  std::vector<uint32_t> threadgroup_memory;
  mslc_size grid;
  mslc_size threadgroup;
  SimulationMode mode;

  void bind(const mx::array& x, bool is_output) {
    const auto known = std::find_if(arrays.begin(), arrays.end(), [&](const DeviceCopy& copy) {
      return is_output && copy.host() == x.data<char>();
    });
    bindings.push_back(known - arrays.begin());
    if (known == arrays.end()) {
      arrays.emplace_back(x, is_output);
    } else {
      known->mark_output();
    }
  }

  void run() {
    std::vector<mslc_buffer> copies;
    for (DeviceCopy& array : arrays) {
      copies.push_back(array.upload());
    }
    std::vector<mslc_buffer> bound;
    for (size_t index : bindings) {
      bound.push_back(copies[index]);
    }
    if (!params.empty()) {
      bound.push_back({params.data(), params.size()});
    }
    mslc_launch request{};
    request.struct_size = sizeof(request);
    request.flags = mode.checked ? MSLC_CHECKED : 0;
    request.kernel = kernel;
    request.buffers = bound.data();
    request.buffer_count = static_cast<unsigned int>(bound.size());
    request.threadgroup_lengths = threadgroup_memory.data();
    request.threadgroup_buffer_count = static_cast<unsigned int>(threadgroup_memory.size());
    request.grid = grid;
    request.threadgroup_size = threadgroup;
    request.seed = mode.seed;
    request.step_limit = kStepLimit;
    mslc_report report{};
    report.struct_size = sizeof(report);
    const bool failed = library->run(&request, &report) != 0 || report.finding_count > 0;
    const std::string text = findings_text(report);
    library->clear_report(&report);
    if (failed) {
      throw_internal_error(op, std::string("simulation of ") + kernel->name + ":" + text);
    }
    for (const DeviceCopy& array : arrays) {
      if (array.is_output()) {
        array.download();
      }
    }
  }
};

}  // namespace

SimulationMode simulation_mode() {
  return current_mode;
}

SimulationMode set_simulation_mode(const SimulationMode& mode) {
  const SimulationMode before = current_mode;
  current_mode = mode;
  return before;
}

void set_simulator_compiler(SimulatorCompiler compiler) {
  std::lock_guard lock(compiler_mutex);
  compile_library = std::move(compiler);
}

void launch_simulator(const KernelLaunch& launch, const mx::Stream& stream) {
  const SimulationMode mode = simulation_mode();
  auto task = std::make_shared<Task>();
  task->library = &library_for(*launch.kernel, mode.checked);
  task->kernel = &task->library->find(*launch.kernel);
  task->op = launch.kernel->op();
  task->mode = mode;
  task->grid = to_size(launch.grid);
  task->threadgroup = to_size(launch.threadgroup);
  task->threadgroup_memory = launch.threadgroup_memory;
  const char* params = static_cast<const char*>(launch.params);
  task->params.assign(params, params + launch.params_size);

  auto& encoder = mx::cpu::get_command_encoder(stream);
  for (const mx::array* input : launch.inputs) {
    encoder.set_input_array(*input);
    task->bind(*input, false);
  }
  for (mx::array* output : launch.outputs) {
    encoder.set_output_array(*output);
    task->bind(*output, true);
  }
  encoder.dispatch([task] { task->run(); });
}

}  // namespace mlx_anvil

// launch() in the Metal simulator: same kernels, bindings, params and grid, on the CPU stream.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "common/build_once.h"
#include "common/errors.h"
#include "common/simulate.h"
#include "mlx/backend/cpu/encoder.h"
#include "python/mlx_anvil/mslc/runtime/abi.h"

namespace mlx_anvil {

namespace {

// A threadgroup counts as hung after this many synchronisation points and steps of unbounded loops.
constexpr unsigned long long kStepLimit = 200'000'000;

std::mutex toolchain_mutex;
SimulatorToolchain registered_toolchain;

SimulatorToolchain toolchain(const std::string& op) {
  std::lock_guard lock(toolchain_mutex);
  if (!registered_toolchain.compile) {
    throw_internal_error(op, "the simulator has no compiler: use mlx_anvil.simulate().");
  }
  return registered_toolchain;
}

// A library compiled by mslc. It stays loaded for the life of the process.
class SimulatorLibrary {
 public:
  SimulatorLibrary(const std::string& op, const std::string& path) : path_(path) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle_) {
      throw_internal_error(op, std::string("the simulator cannot load ") + path + ": " + dlerror());
    }
    // The kernel library links against the runtime, so dlsym() finds the runtime's symbols through
    // it.
    run = symbol<decltype(run)>(op, "mslc_run");
    clear_report = symbol<decltype(clear_report)>(op, "mslc_report_clear");
    clear_profile = symbol<decltype(clear_profile)>(op, "mslc_profile_clear");
    const auto version = symbol<unsigned int (*)()>(op, "mslc_abi_version");
    if (version() != MSLC_ABI_VERSION) {
      throw_internal_error(op, "the simulator's runtime has a different version: " + path);
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

  const std::string& path() const { return path_; }

  int (*run)(const mslc_launch*, mslc_report*) = nullptr;
  void (*clear_report)(mslc_report*) = nullptr;
  void (*clear_profile)(mslc_profile*) = nullptr;

 private:
  template <class Function>
  Function symbol(const std::string& op, const char* name) {
    void* address = dlsym(handle_, name);
    if (!address) {
      throw_internal_error(op, std::string("the simulator lacks ") + name + ".");
    }
    return reinterpret_cast<Function>(address);
  }

  std::string path_;
  void* handle_ = nullptr;
  const mslc_kernel* kernels_ = nullptr;
  unsigned int count_ = 0;
};

const SimulatorLibrary& library_for(const Kernel& kernel, SimulatorChecks checks) {
  static BuildOnce<std::pair<std::string, SimulatorChecks>, SimulatorLibrary> libraries;
  return libraries.get({kernel.pipeline_key(), checks}, [&] {
    return SimulatorLibrary(kernel.op(), toolchain(kernel.op()).compile(kernel, checks));
  });
}

// The byte range that a kernel may access, relative to the array's first element. Views with
// negative strides extend below it.
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

// A copy of an array's memory for one launch. MLX's CPU memory starts 8 bytes after a multiple of
// 16. The copy has the alignment that a GPU buffer would have, no better, and no data of ours
// adjoins it.
class DeviceCopy {
 public:
  DeviceCopy(const mx::array& x, bool is_output)
      : host_(const_cast<char*>(x.data<char>())), reach_(reach_of(x)), is_output_(is_output) {
    offset_ = static_cast<size_t>((x.offset() % kPage + kPage + reach_.low % kPage) % kPage);
    static_assert(kPage % (2 * MSLC_BUFFER_ALIGNMENT) == 0);
  }

  char* host() const { return host_; }
  bool is_output() const { return is_output_; }
  void mark_output() { is_output_ = true; }

  mslc_buffer upload() {
    const size_t start = MSLC_BUFFER_ALIGNMENT + offset_;
    const size_t bytes = start + static_cast<size_t>(reach_.high - reach_.low);
    block_.reset(static_cast<char*>(std::aligned_alloc(kPage, (bytes / kPage + 1) * kPage)));
    first_ = block_.get() + start - reach_.low;
    std::memcpy(first_ + reach_.low, host_ + reach_.low, reach_.high - reach_.low);
    return {first_, static_cast<unsigned long long>(reach_.high),
            static_cast<unsigned long long>(static_cast<int64_t>(offset_) - reach_.low)};
  }

  bool reaches_back() const { return reach_.low < 0; }
  mslc_buffer whole() const {
    return {first_ + reach_.low, static_cast<unsigned long long>(reach_.high - reach_.low),
            offset_};
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

mslc_size to_size(const Extent& extent) {
  return {extent.x, extent.y, extent.z};
}

// What the runtime writes during a launch.
class Results {
 public:
  Results(const SimulatorLibrary& library, mslc_launch& request) : library_(library) {
    report_.struct_size = sizeof(report_);
    request.profile = &profile_;
  }
  ~Results() {
    library_.clear_report(&report_);
    library_.clear_profile(&profile_);
  }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  mslc_report* report() { return &report_; }

 private:
  const SimulatorLibrary& library_;
  mslc_report report_{};
  mslc_profile profile_{};
};

// One launch. Copies its arrays to where a GPU would have them, runs the kernel, and copies back.
struct Simulation {
  const SimulatorLibrary* library;
  const mslc_kernel* kernel;
  const KernelLaunch* launch;
  std::vector<DeviceCopy> arrays;
  std::vector<size_t> bindings;  // indices into arrays: an output may share an input's memory

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
    if (launch->params_size > 0) {
      bound.push_back({const_cast<void*>(launch->params), launch->params_size, 0});
    }
    // A view with negative strides extends below its first element. The checks treat overlapping
    // buffers as one, so its whole memory is bound again, at an index that no kernel reads.
    for (const DeviceCopy& array : arrays) {
      if (array.reaches_back()) {
        bound.push_back(array.whole());
      }
    }
    const SimulationMode mode = simulation_mode();
    mslc_launch request{};
    request.struct_size = sizeof(request);
    request.flags =
        (mode.checks.checked ? MSLC_CHECKED : 0) | (mode.checks.profiled ? MSLC_PROFILED : 0);
    request.kernel = kernel;
    request.buffers = bound.data();
    request.buffer_count = static_cast<unsigned int>(bound.size());
    request.threadgroup_lengths = launch->threadgroup_memory.data();
    request.threadgroup_buffer_count = static_cast<unsigned int>(launch->threadgroup_memory.size());
    request.grid = to_size(launch->grid);
    request.threadgroup_size = to_size(launch->threadgroup);
    request.seed = mode.seed;
    request.step_limit = kStepLimit;
    request.threadgroup_memory_limit =
        mode.matrix_units ? MSLC_MOST_THREADGROUP_MEMORY : MSLC_MAX_THREADGROUP_MEMORY;
    Results results(*library, request);
    const bool failed =
        library->run(&request, results.report()) != 0 || results.report()->finding_count > 0;
    const std::string& op = launch->kernel->op();
    if (failed) {
      const std::string text = toolchain(op).describe(library->path(), results.report());
      throw_internal_error(op, std::string("simulation of ") + kernel->name + ":\n" + text);
    }
    if (mode.checks.profiled) {
      toolchain(op).keep_profile(*launch->kernel, library->path(), results.report(),
                                 request.profile, mode.profiles);
    }
    for (const DeviceCopy& array : arrays) {
      if (array.is_output()) {
        array.download();
      }
    }
  }
};

}  // namespace

void set_simulator_toolchain(SimulatorToolchain toolchain) {
  std::lock_guard lock(toolchain_mutex);
  registered_toolchain = std::move(toolchain);
}

PipelineFacts build_simulator(const Kernel& kernel, SimulatorChecks checks) {
  const unsigned max_threads = library_for(kernel, checks).find(kernel).max_threads;
  return {{"max_threads_per_threadgroup",
           max_threads ? max_threads : unsigned{MSLC_MAX_THREADS_PER_THREADGROUP}},
          {"thread_execution_width", MSLC_SIMD_WIDTH}};
}

void launch_simulator(const KernelLaunch& launch, const mx::Stream& stream) {
  const Kernel& kernel = *launch.kernel;
  Simulation simulation;
  simulation.library = &library_for(kernel, simulation_mode().checks);
  simulation.kernel = &simulation.library->find(kernel);
  simulation.launch = &launch;
  for (const mx::array* input : launch.inputs) {
    simulation.bind(*input, false);
  }
  for (const mx::array* output : launch.outputs) {
    simulation.bind(*output, true);
  }
  // Runs synchronously. An error in a stream's task stays with the stream, and MLX would raise it
  // again in a later, unrelated evaluation.
  mx::synchronize(stream);
  simulation.run();
}

}  // namespace mlx_anvil

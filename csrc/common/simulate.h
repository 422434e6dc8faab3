// The simulator mode of ops (`simulate()` in Python): whether they run their Metal kernels in the
// simulator. A primitive keeps the mode in which it was created.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/launch.h"

namespace mlx_anvil {

// What a library compiled for the simulator contains beside the kernel. At most one is set.
struct SimulatorChecks {
  bool checked = false;   // detects races and out-of-bounds accesses; slower
  bool profiled = false;  // counts accesses to memory; slower

  auto operator<=>(const SimulatorChecks&) const = default;
};

struct SimulationMode {
  bool on = false;
  SimulatorChecks checks;
  uint64_t seed = 0;            // nonzero: shuffles the order in which threads run
  bool matrix_units = false;    // select kernels as for a GPU with matrix units
  bool group_products = false;  // and as for one whose units multiply for four SIMD groups at once
  AppleGpu apple = {};          // select kernels as for this GPU
  uint64_t profiles = 0;        // the list in Python that gets the launches' profiles

  bool operator==(const SimulationMode&) const = default;
};

// The mode of this thread's innermost SimulationScope, otherwise of the innermost `simulate()`.
SimulationMode simulation_mode();

// Returns true if an op that is called now launches its Metal kernels: on a GPU, or simulated.
inline bool for_gpu(mx::Stream s) {
  return s.device == mx::Device::gpu || simulation_mode().on;
}

// Applies a primitive's mode to work on its behalf, whatever block the caller is in.
class SimulationScope {
 public:
  explicit SimulationScope(const SimulationMode& mode);
  ~SimulationScope();
  SimulationScope(const SimulationScope&) = delete;
  SimulationScope& operator=(const SimulationScope&) = delete;

 private:
  const std::optional<SimulationMode> before_;
};

// Functions that Python supplies, because the compiler is Python code (mlx_anvil.mslc).
struct SimulatorToolchain {
  // Compiles a kernel with its function constants. Returns the path of a library with only this
  // kernel. Throws the compiler's message.
  std::function<std::string(const Kernel& kernel, SimulatorChecks checks)> compile;
  // Formats the findings of a report (`report` is an mslc_report*) on a compiled library, with
  // locations in the .metal files.
  std::function<std::string(const std::string& path, const void* report)> describe;
  // Reads the profile of a launch (an mslc_profile*) and appends it to SimulationMode::profiles.
  std::function<void(const Kernel& kernel,
                     const std::string& path,
                     const void* report,
                     const void* profile,
                     uint64_t profiles)>
      keep_profile;
};

void set_simulator_toolchain(SimulatorToolchain toolchain);

PipelineFacts build_simulator(const Kernel& kernel, SimulatorChecks checks);
void launch_simulator(const KernelLaunch& launch, const mx::Stream& stream);

}  // namespace mlx_anvil

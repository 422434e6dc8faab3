// Whether the ops that are being called run their Metal kernels in the simulator (`simulate()` in
// Python). A primitive remembers what it was when it was made.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/launch.h"

namespace mlx_anvil {

struct SimulationMode {
  bool on = false;
  bool checked = false;       // record races and accesses out of bounds; slower
  uint64_t seed = 0;          // other than 0: shuffles the order in which threads run
  bool matrix_units = false;  // choose kernels as for a GPU that has these

  bool operator==(const SimulationMode&) const = default;
};

// That of the innermost SimulationScope of this thread; without one, of the innermost `simulate()`.
SimulationMode simulation_mode();

// For work on behalf of a primitive, whose mode it is, whatever block the caller is in.
class SimulationScope {
 public:
  explicit SimulationScope(const SimulationMode& mode);
  ~SimulationScope();
  SimulationScope(const SimulationScope&) = delete;
  SimulationScope& operator=(const SimulationScope&) = delete;

 private:
  const std::optional<SimulationMode> before_;
};

// What Python does for the simulator, since the compiler lives there (mlx_anvil.mslc).
struct SimulatorToolchain {
  // Compiles a kernel with its function constants; gives the path of a library that holds it alone.
  // Throws what the compiler has to say.
  std::function<std::string(const Kernel& kernel, bool checked)> compile;
  // Text of the findings in a report (the address of an mslc_report) of a library that it compiled,
  // with their places in the .metal files.
  std::function<std::string(const std::string& path, const void* report)> describe;
};

void set_simulator_toolchain(SimulatorToolchain toolchain);

PipelineFacts build_simulator(const Kernel& kernel, bool checked);
void launch_simulator(const KernelLaunch& launch, const mx::Stream& stream);

}  // namespace mlx_anvil

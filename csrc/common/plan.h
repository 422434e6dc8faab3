// Finds the kernels that a graph will launch without running it. Python's prebuild() uses it.
#pragma once

#include <vector>

#include "common/launch.h"
#include "common/simulate.h"
#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

struct PlannedKernel {
  const Kernel* kernel;
  mx::Device device;
  SimulationMode simulation;  // for a CPU device
};

// Returns the kernels of all unevaluated ops behind `outputs`, in the order of their first launch.
// Each op dispatches as usual, on arrays that have a shape, a dtype and strides, but no memory.
// Nothing is evaluated or allocated.
std::vector<PlannedKernel> plan_kernels(const std::vector<mx::array>& outputs);

// Plans a graph that a planned primitive would build and run itself.
void plan_graph(const std::vector<mx::array>& outputs);

// Builds the pipeline that launches of the kernel need, or waits for the thread that is building
// it.
PipelineFacts build_pipeline(const PlannedKernel& planned);

// Returns true while the calling thread plans. allocate() and launch() check it.
bool planning();
mx::allocator::Data planned_memory();
void plan_launch(const KernelLaunch& launch, const mx::Device& device);
// Stands in for a row-contiguous copy of `x`, or for an unevaluated `x`.
mx::array planned_array(const mx::array& x);

}  // namespace mlx_anvil

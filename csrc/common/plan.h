// Which kernels a graph is going to launch, found without running it: what prebuild() is made of.
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
  SimulationMode simulation;  // on a CPU device
};

// Of the ops in the graph behind `outputs` that has not been evaluated, in the order of their first
// launch. Each op dispatches as it would, on arrays that have a shape, a dtype and strides, but no
// memory. Nothing is evaluated or allocated.
std::vector<PlannedKernel> plan_kernels(const std::vector<mx::array>& outputs);

// For a primitive that is planned and runs a graph of its own: adds the kernels of that.
void plan_graph(const std::vector<mx::array>& outputs);

// Builds the pipeline that launches of the kernel need, or waits for the thread that does.
PipelineFacts build_pipeline(const PlannedKernel& planned);

// For allocate() and launch(): whether the calling thread plans.
bool planning();
mx::allocator::Data planned_memory();
void plan_launch(const KernelLaunch& launch, const mx::Device& device);
// Stands in for a copy of `x` that is row-contiguous, or for `x` before it is evaluated.
mx::array planned_array(const mx::array& x);

}  // namespace mlx_anvil

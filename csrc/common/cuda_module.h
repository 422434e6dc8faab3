// Kernels as loaded by the CUDA driver. launch_cuda.cpp requests them; python/mlx_anvil/_cuda.py
// unpacks their files from the package.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/cuda_backend.h"
#include "common/launch.h"

namespace mlx_anvil {

struct ComputeCapability {
  int major;
  int minor;
};

ComputeCapability compute_capability(int device);

// `attribute` is a value of the driver's enumeration of device attributes.
int device_attribute(int device, int attribute);

// Machine code for one architecture, such as "sm_90". Empty if the package has none.
struct Cubin {
  std::string architecture;
  std::string image;
};

// Each returns one kernel's code, after a line that lists the bindings of its parameters.
struct CudaModules {
  std::function<std::string(const Kernel& kernel)> ptx;  // function constants have no values yet
  std::function<Cubin(const Kernel& kernel, ComputeCapability device)> cubin;
};

void set_cuda_modules(CudaModules modules);
bool has_cuda_modules();

// The kernel's parameters are the bindings that it uses, in order of their index.
struct LoadedKernel {
  CUfunction function = nullptr;
  std::vector<uint8_t> bindings;
  std::string architecture;                // of the cubin; empty if the driver assembled the PTX
  mutable uint32_t most_shared_bytes = 0;  // set for launches so far; see launch_cuda.cpp
};

// Loads the kernel once per device and keeps it. Needs a current CUDA context, which MLX sets.
const LoadedKernel& loaded_kernel(const Kernel& kernel, int device);

[[noreturn]] void throw_driver_error(const Kernel& kernel, const char* doing, int result);

}  // namespace mlx_anvil

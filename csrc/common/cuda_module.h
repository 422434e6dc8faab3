// Kernels as the CUDA driver has them. What is loaded are files of the package, which Python
// unpacks (python/mlx_anvil/_cuda.py).
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

// Of the driver's enumeration of device attributes.
int device_attribute(int device, int attribute);

// Machine code for one architecture, such as "sm_90". Empty where the package has none.
struct Cubin {
  std::string architecture;
  std::string image;
};

// Of one kernel, each after a line that tells which bindings its parameters are.
struct CudaModules {
  std::function<std::string(const Kernel& kernel)> ptx;  // its function constants without values
  std::function<Cubin(const Kernel& kernel, ComputeCapability device)> cubin;
};

void set_cuda_modules(CudaModules modules);
bool has_cuda_modules();

// Its parameters are the bindings that it uses, by their index.
struct LoadedKernel {
  CUfunction function = nullptr;
  std::vector<uint8_t> bindings;
  std::string architecture;                // of the cubin; empty where the driver assembled the PTX
  mutable uint32_t most_shared_bytes = 0;  // that launches may give; see launch_cuda.cpp
};

// Loaded once per device, where the calling thread's CUDA context is (MLX sets it), and kept.
const LoadedKernel& loaded_kernel(const Kernel& kernel, int device);

[[noreturn]] void throw_driver_error(const Kernel& kernel, const char* doing, int result);

}  // namespace mlx_anvil

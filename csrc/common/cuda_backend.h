// What we use of MLX's CUDA backend and of the CUDA driver, declared without CUDA headers: one
// extension is built against MLX's CPU wheel and also runs beside its CUDA wheel. The declarations
// follow mlx/backend/cuda of the release that pyproject.toml pins.
#pragma once

#include <cstdint>
#include <functional>

#include "mlx/mlx.h"

struct CUfunc_st;
struct CUmod_st;
using CUfunction = CUfunc_st*;
using CUmodule = CUmod_st*;

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// Weak symbols: beside MLX's CPU build they are null, and the extension still loads.
#define MLX_ANVIL_WEAK __attribute__((weak, visibility("default")))

namespace mlx::core::cu {

class CommandEncoder {
 public:
  MLX_ANVIL_WEAK void set_input_array(const array& input);
  MLX_ANVIL_WEAK void set_output_array(const array& output);
  MLX_ANVIL_WEAK void add_kernel_node_raw(CUfunction kernel,
                                          dim3 grid,
                                          dim3 block,
                                          dim3 cluster,
                                          uint32_t shared_bytes,
                                          void** arguments);
  MLX_ANVIL_WEAK void add_completed_handler(std::function<void()> task);
};

class Device {
 public:
  MLX_ANVIL_WEAK void make_current();
};

MLX_ANVIL_WEAK Device& device(int cuda_device);
MLX_ANVIL_WEAK CommandEncoder& get_command_encoder(Stream stream);

}  // namespace mlx::core::cu

#undef MLX_ANVIL_WEAK

namespace mlx_anvil {

namespace mx = mlx::core;

// Returns true if the MLX in this process is a CUDA build, even without a usable GPU.
inline bool mlx_has_cuda() {
  return mx::cu::get_command_encoder != nullptr;
}

// The device address of an array's first element. array.data() is no substitute: it moves the array
// to host-readable memory.
inline void* device_address(const mx::array& x) {
  struct CudaBuffer {
    char* data;
  };
  const void* buffer = x.buffer().ptr();
  return buffer ? static_cast<const CudaBuffer*>(buffer)->data + x.offset() : nullptr;
}

// Driver functions from the library that MLX has loaded. They return CUresult: 0 is success.
struct CudaDriver {
  int (*module_load)(CUmodule*, const void* text, unsigned count, int* options, void** values);
  int (*module_function)(CUfunction*, CUmodule, const char* name);
  int (*set_function_attribute)(CUfunction, int attribute, int value);
  int (*function_attribute)(int* value, int attribute, CUfunction);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*error_text)(int result, const char** text);
};

// Null if there is no driver.
const CudaDriver* cuda_driver();

}  // namespace mlx_anvil

#include <dlfcn.h>

#include "common/cuda_backend.h"

namespace mlx_anvil {

namespace {

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

const CudaDriver* cuda_driver() {
  static CudaDriver driver{};
  static const bool found = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library && find(library, "cuModuleLoadDataEx", driver.module_load) &&
           find(library, "cuModuleGetFunction", driver.module_function) &&
           find(library, "cuFuncSetAttribute", driver.set_function_attribute) &&
           find(library, "cuFuncGetAttribute", driver.function_attribute) &&
           find(library, "cuDeviceGetAttribute", driver.device_attribute) &&
           find(library, "cuGetErrorString", driver.error_text);
  }();
  return found ? &driver : nullptr;
}

}  // namespace mlx_anvil

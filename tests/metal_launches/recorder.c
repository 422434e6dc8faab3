// Stands in for a library that mslc compiled: has every kernel it is told of, and runs none.
#include <stdlib.h>
#include <string.h>

#include "mlx_anvil/mslc/runtime/abi.h"

enum { kMostKernels = 65536 };
static mslc_kernel kernels[kMostKernels];
static unsigned int kernel_count;

MSLC_API int recorder_add(const char* name) {
  if (kernel_count == kMostKernels) {
    return 0;
  }
  kernels[kernel_count++].name = strdup(name);
  return 1;
}

MSLC_API const mslc_kernel* mslc_kernels(unsigned int* count) {
  *count = kernel_count;
  return kernels;
}

MSLC_API unsigned int mslc_abi_version(void) {
  return MSLC_ABI_VERSION;
}

MSLC_API int mslc_run(const mslc_launch* launch, mslc_report* report) {
  (void)launch;
  (void)report;
  return 0;
}

MSLC_API void mslc_report_clear(mslc_report* report) {
  (void)report;
}

MSLC_API void mslc_profile_clear(mslc_profile* profile) {
  (void)profile;
}

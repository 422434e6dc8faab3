// The functions of abi.h that compiled kernels call. They forward to the worker that runs the
// kernel.
#include "abi.h"
#include "worker.h"

using mslc::Worker;

extern "C" {

unsigned int mslc_lane(void) {
  return Worker::current()->lane();
}

void mslc_collective(void* value, mslc_combine combine, const mslc_site* site) {
  Worker::current()->collective(value, combine, site, __builtin_return_address(0));
}

void mslc_barrier(int scope, unsigned int fences, const mslc_site* site) {
  if (scope == MSLC_SCOPE_THREADGROUP)
    Worker::current()->threadgroup_barrier(fences, site, __builtin_return_address(0));
  else
    Worker::current()->collective(nullptr, nullptr, site, __builtin_return_address(0));
}

void* mslc_threadgroup_variable(const mslc_variable* variable,
                                unsigned long long size,
                                unsigned int alignment) {
  return Worker::current()->threadgroup_variable(variable, size, alignment,
                                                 __builtin_return_address(0));
}

void mslc_step(void) {
  Worker::current()->step(__builtin_return_address(0));
}
}

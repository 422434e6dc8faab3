#pragma once
#if __METAL_VERSION__ < 400
#error "MetalPerformancePrimitives needs Metal 4: compile with __METAL_VERSION__=400 or later"
#endif
#include <metal_cooperative_tensor>
namespace metal {
using ::mslc::metal4::execution_simdgroup;
using ::mslc::metal4::execution_simdgroups;
using ::mslc::metal4::execution_thread;
}  // namespace metal
namespace mpp {
namespace tensor_ops {
using ::mslc::metal4::tensor_ops::matmul2d;
using ::mslc::metal4::tensor_ops::matmul2d_descriptor;
}  // namespace tensor_ops
}  // namespace mpp

// The kernels of selective_scan for one instruction set.
#include "selective_scan/simd/backward.h"
#include "selective_scan/simd/forward.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T>
constexpr ScanKernels kernels() {
  return {.forward = scan_forward<T>,
          .backward = scan_backward<T>,
          .forward_scratch_bytes = scan_forward_scratch,
          .backward_scratch_bytes = scan_backward_scratch,
          .block_channels = kBlockChannels};
}

}  // namespace

const PerDtype<ScanKernels> scan_kernels_table = {kernels<float>(), kernels<f16>(),
                                                  kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

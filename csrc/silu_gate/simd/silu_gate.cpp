// silu_gate on the CPU, with the formulas of metal/silu_gate/silu_gate.h.
#include "common/simd/elementwise.h"
#include "common/simd/math.h"
#include "silu_gate/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// gate, up -> silu(gate) up
struct Forward {
  static constexpr int kInputs = 2;
  static constexpr int kOutputs = 1;
  template <class T>
  static void apply(const f32v* in, f32v* out, float) {
    out[0] = silu<kAccuracyOf<T>>(in[0]) * in[1];
  }
};

// gate, up, dy -> d gate, d up
struct Backward {
  static constexpr int kInputs = 3;
  static constexpr int kOutputs = 2;
  template <class T>
  static void apply(const f32v* in, f32v* out, float) {
    const f32v gate = in[0], up = in[1], dy = in[2];
    const Silu silu = silu_with_derivative<kAccuracyOf<T>>(gate);
    out[0] = dy * (up * silu.derivative);
    out[1] = dy * silu.value;
  }
};

// gate, up, their tangents -> tangent of the output
struct Jvp {
  static constexpr int kInputs = 4;
  static constexpr int kOutputs = 1;
  template <class T>
  static void apply(const f32v* in, f32v* out, float) {
    const f32v gate = in[0], up = in[1], gate_tangent = in[2], up_tangent = in[3];
    const Silu silu = silu_with_derivative<kAccuracyOf<T>>(gate);
    out[0] = gate_tangent * (up * silu.derivative) + up_tangent * silu.value;
  }
};

}  // namespace

constinit const ElementwiseKernels silu_gate_forward_kernels_table = elementwise_kernels<Forward>();
constinit const ElementwiseKernels silu_gate_backward_kernels_table =
    elementwise_kernels<Backward>();
constinit const ElementwiseKernels silu_gate_jvp_kernels_table = elementwise_kernels<Jvp>();

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

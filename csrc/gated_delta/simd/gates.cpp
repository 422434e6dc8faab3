// Decays and rates: g = exp(-exp(A_log) softplus(a + dt_bias)), or with a lower bound
// exp(bound sigmoid(exp(A_log) (a + dt_bias))); beta = scale sigmoid(b).
#include "gated_delta/simd/gates.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T>
void gates(const DeltaGatesForwardArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t columns = args.columns(), heads = args.heads;
  const GateColumns own = load_gate_columns<T>(args, scratch);
  for (int64_t row = begin; row < end; ++row) {
    const T* const a = static_cast<const T*>(args.a) + row * columns;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const f32v x = load_columns(a, 1, c, columns) + load_lanes(own.biases + c);
      const Decays decays = decays_of(args, x, load_lanes(own.speeds + c));
      store_columns(args.g + row * columns, c, columns, decays.g);
    }
    const T* const b = static_cast<const T*>(args.b) + row * heads;
    for (int64_t h = 0; h < heads; h += kLanes) {
      const Slope rate = SigmoidActivation::slope<Accuracy::kFloat32>(load_columns(b, 1, h, heads));
      store_columns(args.beta + row * heads, h, heads, rate.value * args.rate_scale);
    }
  }
}

}  // namespace

constinit const PerDtype<DeltaGatesForwardKernel> gated_delta_gates_forward_kernels_table = {
    .float32 = gates<float>, .float16 = gates<f16>, .bfloat16 = gates<bf16>};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

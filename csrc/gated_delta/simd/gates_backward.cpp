// Gradients of decays and rates, with x = a + dt_bias: d_a = d_x = d_g dg/dx, which is summed up
// for dt_bias, and d_g dg/dA_log for A_log; d_b = d_beta scale s (1 - s) with s = sigmoid(b).
#include "gated_delta/simd/gates.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

inline void add_lanes(float* to, f32v x) {
  store_lanes(to, load_lanes(to) + x);
}

template <class T>
void backward(
    const DeltaGatesBackwardArgs& args, int64_t begin, int64_t end, float* scratch, float* sums) {
  const int64_t columns = args.columns(), heads = args.heads;
  float* const of_log = sums ? sums + args.row_size() : nullptr;
  const GateColumns own = load_gate_columns<T>(args, scratch);
  for (int64_t row = begin; row < end; ++row) {
    const T* const a = static_cast<const T*>(args.a) + row * columns;
    T* const d_a = static_cast<T*>(args.d_a) + row * columns;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const f32v x = load_columns(a, 1, c, columns) + load_lanes(own.biases + c);
      const Decays decays = decays_of(args, x, load_lanes(own.speeds + c));
      const f32v d_g = load_columns(args.d_g + row * columns, 1, c, columns);
      const f32v d_x = d_g * decays.by_x;
      store_columns(d_a, c, columns, d_x);
      if (sums) {
        add_lanes(sums + c, d_x);
        add_lanes(of_log + c, d_g * decays.by_log);
      }
    }
    const T* const b = static_cast<const T*>(args.b) + row * heads;
    T* const d_b = static_cast<T*>(args.d_b) + row * heads;
    for (int64_t h = 0; h < heads; h += kLanes) {
      const Slope rate = SigmoidActivation::slope<Accuracy::kFloat32>(load_columns(b, 1, h, heads));
      const f32v d_beta = load_columns(args.d_beta + row * heads, 1, h, heads);
      store_columns(d_b, h, heads, d_beta * (rate.derivative * args.rate_scale));
    }
  }
}

}  // namespace

constinit const PerDtype<DeltaGatesBackwardKernel> gated_delta_gates_backward_kernels_table = {
    .float32 = backward<float>, .float16 = backward<f16>, .bfloat16 = backward<bf16>};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// Decays and rates: g = exp(-exp(A_log) softplus(a + dt_bias)), or with a lower bound
// exp(bound sigmoid(exp(A_log) (a + dt_bias))); beta = scale sigmoid(b).
#include "common/integers.h"
#include "common/simd/activations.h"
#include "gated_delta/simd/gates_kernels.h"
#include "gated_delta/simd/steps.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

inline f32v sigmoid_of(f32v x) {
  return SigmoidActivation::or_nan(sigmoid<Accuracy::kFloat32>(x).value, x);
}

template <class T>
f32v load_weights(const void* from, bool is_float32, int64_t at, int64_t columns) {
  return is_float32 ? load_columns(static_cast<const float*>(from), 1, at, columns)
                    : load_columns(static_cast<const T*>(from), 1, at, columns);
}

template <class T>
void gates(const DeltaGatesArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t columns = args.heads * args.channels;
  float* const speeds = scratch;
  float* const biases = scratch + round_up(columns, kLanes);
  for (int64_t head = 0; head < args.heads; ++head) {
    const f32v log = load_weights<T>(args.a_log, args.log_is_float32, head, args.heads);
    const float speed = exp(log)[0];
    for (int64_t c = head * args.channels; c < (head + 1) * args.channels; ++c) {
      speeds[c] = speed;
    }
  }
  for (int64_t c = 0; c < columns; c += kLanes) {
    store_lanes(biases + c, load_weights<T>(args.dt_bias, args.bias_is_float32, c, columns));
  }
  for (int64_t row = begin; row < end; ++row) {
    const T* const a = static_cast<const T*>(args.a) + row * columns;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const f32v x = load_columns(a, 1, c, columns) + load_lanes(biases + c);
      const f32v speed = load_lanes(speeds + c);
      const f32v exponent =
          args.is_bounded ? sigmoid_of(speed * x) * args.lower_bound : -(speed * softplus(x));
      store_columns(args.g + row * columns, c, columns, exp(exponent));
    }
    const T* const b = static_cast<const T*>(args.b) + row * args.heads;
    for (int64_t h = 0; h < args.heads; h += kLanes) {
      const f32v rate = sigmoid_of(load_columns(b, 1, h, args.heads)) * args.rate_scale;
      store_columns(args.beta + row * args.heads, h, args.heads, rate);
    }
  }
}

}  // namespace

constinit const PerDtype<DeltaGatesKernels> gated_delta_gates_kernels_table = {
    .float32 = gates<float>, .float16 = gates<f16>, .bfloat16 = gates<bf16>};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

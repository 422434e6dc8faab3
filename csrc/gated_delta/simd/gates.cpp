// Decays and rates: g = exp(-exp(A_log) softplus(a + dt_bias)), or with a lower bound
// exp(bound sigmoid(exp(A_log) (a + dt_bias))); beta = scale sigmoid(b).
#include "common/integers.h"
#include "common/simd/math.h"
#include "gated_delta/simd/gates_kernels.h"
#include "gated_delta/simd/steps.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// NaN for NaN.
inline f32v sigmoid_of(f32v x) {
  const f32v s = sigmoid<Accuracy::kFloat32>(x).value;
  return x == x ? s : x;
}

template <class T>
f32v load_weights(const void* from, bool is_float32, int64_t at, int64_t count) {
  return is_float32 ? load_first(static_cast<const float*>(from) + at, count)
                    : load_first(static_cast<const T*>(from) + at, count);
}

template <class T>
void gates(const DeltaGatesArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t columns = args.heads * args.channels;
  float* const speeds = scratch;
  float* const biases = scratch + round_up(columns, kLanes);
  for (int64_t head = 0; head < args.heads; ++head) {
    const f32v log = load_weights<T>(args.a_log, args.log_is_float32, head, 1);
    const float speed = exp(log)[0];
    for (int64_t c = head * args.channels; c < (head + 1) * args.channels; ++c) {
      speeds[c] = speed;
    }
  }
  for (int64_t c = 0; c < columns; c += kLanes) {
    store_lanes(biases + c, load_weights<T>(args.dt_bias, args.bias_is_float32, c, columns - c));
  }
  for (int64_t row = begin; row < end; ++row) {
    const T* const a = static_cast<const T*>(args.a) + row * columns;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const f32v x = load_first(a + c, columns - c) + load_lanes(biases + c);
      const f32v speed = load_lanes(speeds + c);
      const f32v exponent =
          args.is_bounded ? sigmoid_of(speed * x) * args.lower_bound : -(speed * softplus(x));
      store_first(args.g + row * columns + c, columns - c, exp(exponent));
    }
    const T* const b = static_cast<const T*>(args.b) + row * args.heads;
    for (int64_t h = 0; h < args.heads; h += kLanes) {
      const f32v rate = sigmoid_of(load_first(b + h, args.heads - h)) * args.rate_scale;
      store_first(args.beta + row * args.heads + h, args.heads - h, rate);
    }
  }
}

}  // namespace

constinit const PerDtype<DeltaGatesKernels> gated_delta_gates_kernels_table = {
    .float32 = gates<float>, .float16 = gates<f16>, .bfloat16 = gates<bf16>};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

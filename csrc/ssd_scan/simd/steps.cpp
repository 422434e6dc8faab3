// Step sizes and decays: softplus(dt + bias), clipped, and exp of that times A.
#include "common/simd/math.h"
#include "common/simd/panels.h"
#include "ssd_scan/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T>
void steps(const SsdStepsArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t batch = row / args.length, t = row - batch * args.length;
    const bool counts = !args.lengths || t < args.lengths[batch];
    const T* const dt = static_cast<const T*>(args.dt) + batch * args.dt_batch + t * args.dt_step;
    for (int64_t h = 0; h < args.heads; h += kLanes) {
      f32v x = counts ? load_columns(dt, 1, h, args.heads) : f32v{};
      if (args.bias) {
        x += load_columns(args.bias, 1, h, args.heads);
      }
      if (args.softplus) {
        x = softplus(x);
      }
      x = x < splat(args.least) ? splat(args.least) : x;  // NaN stays
      x = x > splat(args.most) ? splat(args.most) : x;
      const f32v decay = exp(x * load_columns(args.a, 1, h, args.heads));
      store_columns(args.steps + row * args.heads, h, args.heads, x);
      store_columns(args.decays + row * args.heads, h, args.heads, decay);
    }
  }
}

}  // namespace

constinit const PerDtype<SsdStepsKernel> ssd_steps_kernels_table = {
    .float32 = steps<float>, .float16 = steps<f16>, .bfloat16 = steps<bf16>};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

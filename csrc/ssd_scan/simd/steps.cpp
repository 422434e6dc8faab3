// Step sizes and decays: softplus(dt + bias), clipped, and exp of that times A; and their
// gradients.
#include "common/simd/math.h"
#include "common/simd/panels.h"
#include "ssd_scan/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Some heads of a step.
struct Steps {
  f32v x;      // dt + bias
  f32v given;  // before the clip
  f32v size;
  f32v rate, decay;
};

template <class T>
class Row {
 public:
  Row(const SsdStepsArgs& args, int64_t row) : args_(args) {
    const int64_t batch = row / args.length, t = row - batch * args.length;
    dt_ = static_cast<const T*>(args.dt) + batch * args.dt_batch + t * args.dt_step;
    a_ = args.a + batch * args.a_batch;
    bias_ = args.bias ? args.bias + batch * args.bias_batch : nullptr;
    counts_ = !args.lengths || t < args.lengths[batch];
  }

  bool counts() const { return counts_; }

  Steps at(int64_t head) const {
    Steps steps;
    steps.x = counts_ ? load_columns(dt_, 1, head, args_.heads) : f32v{};
    if (bias_) {
      steps.x += load_columns(bias_, 1, head, args_.heads);
    }
    steps.given = args_.softplus ? softplus(steps.x) : steps.x;
    const f32v least = splat(args_.least), most = splat(args_.most);
    steps.size = steps.given < least ? least : steps.given;  // NaN stays
    steps.size = steps.size > most ? most : steps.size;
    steps.rate = load_columns(a_, 1, head, args_.heads);
    steps.decay = exp(steps.size * steps.rate);
    return steps;
  }

 private:
  const SsdStepsArgs& args_;
  const T* dt_;
  const float *a_, *bias_;
  bool counts_;
};

template <class T>
void forward(const SsdStepsArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const Row<T> own(args, row);
    for (int64_t h = 0; h < args.heads; h += kLanes) {
      const Steps steps = own.at(h);
      store_columns(args.steps + row * args.heads, h, args.heads, steps.size);
      store_columns(args.decays + row * args.heads, h, args.heads, steps.decay);
    }
  }
}

template <class T>
void backward(const SsdStepsArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const Row<T> own(args, row);
    const int64_t first = row * args.heads;
    for (int64_t h = 0; h < args.heads; h += kLanes) {
      f32v d_x = {}, d_a = {};
      if (own.counts()) {
        const Steps steps = own.at(h);
        const f32v d_exponent = load_columns(args.d_decays + first, 1, h, args.heads) * steps.decay;
        d_a = d_exponent * steps.size;
        d_x = load_columns(args.d_steps + first, 1, h, args.heads) + d_exponent * steps.rate;
        d_x = steps.given > splat(args.least) ? d_x : f32v{};
        d_x = steps.given < splat(args.most) ? d_x : f32v{};
        d_x = args.softplus ? times_sigmoid<Accuracy::kFloat32>(d_x, steps.x) : d_x;
      }
      store_columns(args.d_dt + first, h, args.heads, d_x);
      store_columns(args.d_a + first, h, args.heads, d_a);
    }
  }
}

template <class T>
constexpr SsdStepsKernels kernels() {
  return {forward<T>, backward<T>};
}

}  // namespace

constinit const PerDtype<SsdStepsKernels> ssd_steps_kernels_table = {
    .float32 = kernels<float>(), .float16 = kernels<f16>(), .bfloat16 = kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// The graph node of gated_delta_gates, its CPU driver and its launch.
#include <algorithm>
#include <string>
#include <utility>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "common/parallel.h"
#include "common/run_on_cpu.h"
#include "common/thread_scratch.h"
#include "common/trace.h"
#include "common/vmap_axis.h"
#include "gated_delta/gates.h"
#include "gated_delta/simd/gates_kernels.h"
#include "metal/gated_delta/params.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kGatesGrain = 8192;  // least numbers per thread
constexpr int64_t kGatesThreads = 256;

// Indices as in metal/gated_delta/gates.metal.
enum GatesConstant : uint32_t { kLogIsFloat32, kBiasIsFloat32, kIsBounded };

class GatedDeltaGates : public FusedPrimitive {
 public:
  GatedDeltaGates(mx::Stream stream, const GatesConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return kGatedDeltaGates; }
  const char* kind() const override { return "GatedDeltaGates"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const GatedDeltaGates&>(other).config_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const auto widened = [&](size_t i) { return mx::astype(inputs[i], mx::float32, s); };
    const bool per_channel = inputs[0].ndim() > inputs[1].ndim();
    mx::array speed = mx::exp(widened(2), s);
    speed = per_channel ? mx::expand_dims(speed, -1, s) : speed;
    const mx::array x = mx::add(widened(0), widened(3), s);
    const mx::array exponent =
        config_.lower_bound
            ? mx::multiply(mx::array(*config_.lower_bound),
                           mx::sigmoid(mx::multiply(speed, x, s), s), s)
            : mx::negative(mx::multiply(speed, mx::logaddexp(x, mx::array(0.0f), s), s), s);
    const mx::array rate = mx::sigmoid(widened(1), s);
    return {mx::exp(exponent, s), mx::multiply(rate, mx::array(config_.rate_scale), s)};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape(), inputs[1].shape()};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    const DeltaGatesArgs args = arguments(inputs, outputs);
    const DeltaGatesKernels& kernels = gated_delta_gates_kernels()[kernel_dtype_of(inputs[0])];
    const int64_t columns = args.heads * args.channels;
    run_on_cpu(
        *this, inputs, outputs,
        [args, columns, &kernels] {
          const int64_t grain = ceil_div(kGatesGrain, std::max<int64_t>(1, columns));
          parallel_for(args.rows, grain, [&](int64_t begin, int64_t end) {
            const int64_t bytes = 2 * round_up(columns, 16) * static_cast<int64_t>(sizeof(float));
            kernels(args, begin, end, static_cast<float*>(thread_scratch(bytes)));
          });
        },
        [&] { return std::string(op()) + "_" + to_text(inputs[0].dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    if (outputs[0].size() == 0 && outputs[1].size() == 0) {
      return;
    }
    const mx::array& b = inputs[1];
    GatedDeltaGatesParams params{};
    params.rows = static_cast<int64_t>(b.size()) / std::max(1, b.shape(-1));
    params.heads = b.shape(-1);
    params.channels = inputs[0].ndim() > b.ndim() ? inputs[0].shape(-1) : 1;
    params.lower_bound = config_.lower_bound.value_or(0.0f);
    params.rate_scale = config_.rate_scale;
    KernelLaunch request{};
    request.kernel = &kernel_named("gated_delta", {"gated_delta_gates_", dtype_name(b)},
                                   {{kLogIsFloat32, inputs[2].dtype() == mx::float32},
                                    {kBiasIsFloat32, inputs[3].dtype() == mx::float32},
                                    {kIsBounded, config_.lower_bound.has_value()}});
    request.inputs = {&inputs[0], &inputs[1], &inputs[2], &inputs[3]};
    request.outputs = {&outputs[0], &outputs[1]};
    request.params = &params;
    request.params_size = sizeof(params);
    const auto threads = static_cast<int64_t>(std::max(outputs[0].size(), outputs[1].size()));
    request.grid = linear_grid(threads, kGatesThreads);
    request.threadgroup = {kGatesThreads, 1, 1};
    launch(request, stream());
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  // Batch elements that share their weights are rows of one call.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    if (axes[2] >= 0 || axes[3] >= 0) {
      return FusedPrimitive::batched(inputs, axes);
    }
    const int length = vmap_length(inputs, axes);
    const auto in_front = [&](size_t i) {
      return repeated_over_vmap(inputs[i], axes[i], 0, length, stream());
    };
    return {apply_gates(config_, {in_front(0), in_front(1), inputs[2], inputs[3]}, stream()),
            {0, 0}};
  }

 private:
  DeltaGatesArgs arguments(const Arrays& inputs, Arrays& outputs) const {
    const mx::array& b = inputs[1];
    DeltaGatesArgs args{};
    args.a = inputs[0].data<void>();
    args.b = b.data<void>();
    args.a_log = inputs[2].data<void>();
    args.dt_bias = inputs[3].data<void>();
    args.log_is_float32 = inputs[2].dtype() == mx::float32;
    args.bias_is_float32 = inputs[3].dtype() == mx::float32;
    args.g = outputs[0].data<float>();
    args.beta = outputs[1].data<float>();
    args.heads = b.shape(-1);
    args.channels = inputs[0].ndim() > b.ndim() ? inputs[0].shape(-1) : 1;
    args.rows = static_cast<int64_t>(b.size()) / std::max<int64_t>(1, args.heads);
    args.is_bounded = config_.lower_bound.has_value();
    args.lower_bound = config_.lower_bound.value_or(0.0f);
    args.rate_scale = config_.rate_scale;
    return args;
  }

  const GatesConfig config_;
};

}  // namespace

Arrays apply_gates(const GatesConfig& config, GatesInputs in, mx::Stream stream) {
  auto primitive = std::make_shared<GatedDeltaGates>(stream, config);
  Arrays inputs = {std::move(in.a), std::move(in.b), std::move(in.a_log), std::move(in.dt_bias)};
  std::string why_not;
  if (stream.device == mx::Device::gpu && !can_launch(stream.device, &why_not)) {
    note_fallback(kGatedDeltaGates, why_not);
    return primitive->compose(inputs);
  }
  return outputs_of(std::move(primitive), {mx::float32, mx::float32}, std::move(inputs));
}

}  // namespace mlx_anvil

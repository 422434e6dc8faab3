#include "ssd_scan/steps.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "common/mlx_ops.h"
#include "common/parallel.h"
#include "common/run_on_cpu.h"
#include "common/shapeless.h"
#include "common/trace.h"
#include "common/vmap_axis.h"
#include "metal/ssd_scan/params.h"
#include "ssd_scan/simd/kernels.h"
#include "ssd_scan/ssd_scan.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kGrain = 4096;  // least numbers per thread
constexpr int64_t kThreads = 256;

// Indices as in metal/ssd_scan/steps.metal.
enum StepsConstant : uint32_t { kHasBias, kHasSoftplus, kHasLengths };

// Inputs: dt, A, then bias and lengths if the call has them. Outputs: decays and step sizes.
class SsdSteps : public FusedPrimitive {
 public:
  SsdSteps(mx::Stream stream, const SsdStepsConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return kSsdScan; }
  const char* kind() const override { return "SsdSteps"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const SsdSteps&>(other).config_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::array zero(0.0f);
    mx::array steps = mx::astype(inputs[0], mx::float32, s);
    if (config_.has_lengths) {
      const mx::array at = mx::arange(0, steps.shape(1), 1, mx::int32, s);
      const mx::array counts = mx::less(mx::expand_dims(at, {0, 2}, s),
                                        mx::expand_dims(inputs[lengths_at()], {1, 2}, s), s);
      steps = choose(counts, steps, zero, s);
    }
    if (config_.has_bias) {
      steps = mx::add(steps, inputs[2], s);
    }
    if (config_.softplus) {
      steps = mx::logaddexp(steps, zero, s);
    }
    if (config_.least > -INFINITY) {
      steps = mx::maximum(steps, mx::array(config_.least), s);
    }
    if (config_.most < INFINITY) {
      steps = mx::minimum(steps, mx::array(config_.most), s);
    }
    return {mx::exp(mx::multiply(steps, inputs[1], s), s), steps};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape(), inputs[0].shape()};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    const mx::array& dt = inputs[0];
    SsdStepsArgs args{};
    args.dt = dt.data<void>();
    args.dt_batch = dt.strides(0);
    args.dt_step = dt.strides(1);
    args.a = inputs[1].data<float>();
    args.bias = config_.has_bias ? inputs[2].data<float>() : nullptr;
    args.lengths = config_.has_lengths ? inputs[lengths_at()].data<int32_t>() : nullptr;
    args.decays = outputs[0].data<float>();
    args.steps = outputs[1].data<float>();
    args.length = dt.shape(1);
    args.heads = dt.shape(2);
    args.softplus = config_.softplus;
    args.least = config_.least;
    args.most = config_.most;
    const int64_t rows = args.length * dt.shape(0);
    const SsdStepsKernel kernel = ssd_steps_kernels()[kernel_dtype_of(dt)];
    run_on_cpu(
        *this, inputs, outputs,
        [args, rows, kernel] {
          parallel_for(rows, ceil_div(kGrain, args.heads),
                       [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
        },
        [&] { return std::string(op()) + "_steps_" + to_text(inputs[0].dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    const mx::array& dt = inputs[0];
    if (dt.size() == 0) {
      return;
    }
    SsdStepsParams params{};
    std::copy_n(dt.strides().begin(), 2, params.dt_strides);
    params.rows = int64_t{dt.shape(0)} * dt.shape(1);
    params.length = dt.shape(1);
    params.heads = dt.shape(2);
    params.least = config_.least;
    params.most = config_.most;
    KernelLaunch request{};
    request.kernel = &kernel_named(kSsdScan, {"ssd_scan_steps_", dtype_name(dt)},
                                   {{kHasBias, config_.has_bias},
                                    {kHasSoftplus, config_.softplus},
                                    {kHasLengths, config_.has_lengths}});
    request.inputs = {&dt, &inputs[1], config_.has_bias ? &inputs[2] : &inputs[1],
                      config_.has_lengths ? &inputs[lengths_at()] : &inputs[1]};
    request.outputs = {&outputs[0], &outputs[1]};
    request.params = &params;
    request.params_size = sizeof(params);
    request.grid = linear_grid(static_cast<int64_t>(dt.size()), kThreads);
    request.threadgroup = {kThreads, 1, 1};
    launch(request, stream());
  }

 protected:
  bool wants_dense(size_t) const override { return true; }
  bool takes(size_t i, const mx::array& x) const override {
    return i == 0 && (x.strides(2) == 1 || x.shape(2) == 1);
  }

  // The axis becomes part of the batch, unless A or the bias has it.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    if (axes[1] >= 0 || (config_.has_bias && axes[2] >= 0)) {
      return FusedPrimitive::batched(inputs, axes);
    }
    const int length = vmap_length(inputs, axes);
    const auto folded = [&](size_t i) {
      return mx::flatten(repeated_over_vmap(inputs[i], axes[i], 0, length, stream()), 0, 1,
                         stream());
    };
    std::optional<mx::array> bias, lengths;
    if (config_.has_bias) {
      bias = inputs[2];
    }
    if (config_.has_lengths) {
      lengths = folded(lengths_at());
    }
    Arrays outputs = apply_ssd_steps(config_, folded(0), inputs[1], bias, lengths, stream());
    for (mx::array& out : outputs) {
      out = mx::unflatten(out, 0, {length, out.shape(0) / std::max(length, 1)}, stream());
    }
    return {outputs, {0, 0}};
  }

 private:
  size_t lengths_at() const { return config_.has_bias ? 3 : 2; }

  const SsdStepsConfig config_;
};

}  // namespace

Arrays apply_ssd_steps(SsdStepsConfig config,
                       const mx::array& dt,
                       const mx::array& a,
                       const std::optional<mx::array>& bias,
                       const std::optional<mx::array>& lengths,
                       mx::Stream s) {
  config.has_bias = bias.has_value();
  config.has_lengths = lengths.has_value();
  Arrays inputs = {dt, a};
  OptionalInputs::append(inputs, bias);
  OptionalInputs::append(inputs, lengths);
  auto primitive = std::make_shared<SsdSteps>(s, config);
  std::string why_not;
  if (s.device == mx::Device::gpu && !can_launch(s.device, &why_not)) {
    note_fallback(kSsdScan, why_not);
    return primitive->compose(inputs);
  }
  return outputs_of(std::move(primitive), {mx::float32, mx::float32}, std::move(inputs));
}

}  // namespace mlx_anvil

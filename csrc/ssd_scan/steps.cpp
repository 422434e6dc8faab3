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

// Inputs: dt, A, then bias and lengths if the call has them. All outputs have the shape of dt.
class SsdStepsPrimitive : public FusedPrimitive {
 public:
  SsdStepsPrimitive(mx::Stream stream, const SsdStepsConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return kSsdScan; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const SsdStepsPrimitive&>(other).config_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape(), inputs[0].shape()};
  }

 protected:
  // The same node on other inputs.
  virtual Arrays again(Arrays inputs) = 0;

  bool wants_dense(size_t) const override { return true; }

  // dt, A and the bias have rows of heads.
  bool takes(size_t i, const mx::array& x) const override {
    return i < lengths_at() && (x.strides(-1) == 1 || x.shape(-1) == 1);
  }

  // The axis becomes part of the batch.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const int length = vmap_length(inputs, axes);
    Arrays folded;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const mx::array x = repeated_over_vmap(inputs[i], axes[i], 0, length, stream());
      folded.push_back(mx::flatten(x, 0, 1, stream()));
    }
    return {unfolded_from_batch(again(std::move(folded)), length, stream()), {0, 0}};
  }

  size_t lengths_at() const { return config_.has_bias ? 3 : 2; }
  size_t count() const { return lengths_at() + config_.has_lengths; }

  SsdStepsArgs arguments(const Arrays& inputs) const {
    const mx::array& dt = inputs[0];
    SsdStepsArgs args{};
    args.dt = dt.data<void>();
    args.dt_batch = dt.strides(0);
    args.dt_step = dt.strides(1);
    args.a = inputs[1].data<float>();
    args.a_batch = inputs[1].strides(0);
    if (config_.has_bias) {
      args.bias = inputs[2].data<float>();
      args.bias_batch = inputs[2].strides(0);
    }
    args.lengths = config_.has_lengths ? inputs[lengths_at()].data<int32_t>() : nullptr;
    args.length = dt.shape(1);
    args.heads = dt.shape(2);
    args.softplus = config_.softplus;
    args.least = config_.least;
    args.most = config_.most;
    return args;
  }

  void run(const char* variant,
           const SsdStepsArgs& args,
           void (*kernel)(const SsdStepsArgs&, int64_t, int64_t),
           const Arrays& inputs,
           Arrays& outputs) {
    const int64_t rows = args.length * inputs[0].shape(0);
    run_on_cpu(
        *this, inputs, outputs,
        [args, rows, kernel] {
          parallel_for(rows, ceil_div(kGrain, args.heads),
                       [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
        },
        [&] { return std::string(op()) + "_" + variant + "_" + to_text(inputs[0].dtype()); });
  }

  void launch_steps(const char* variant, const Arrays& inputs, Arrays& outputs) {
    const mx::array& dt = inputs[0];
    if (dt.size() == 0) {
      return;
    }
    SsdStepsParams params{};
    std::copy_n(dt.strides().begin(), 2, params.dt_strides);
    params.a_stride = inputs[1].strides(0);
    params.bias_stride = config_.has_bias ? inputs[2].strides(0) : 0;
    params.rows = int64_t{dt.shape(0)} * dt.shape(1);
    params.length = dt.shape(1);
    params.heads = dt.shape(2);
    params.least = config_.least;
    params.most = config_.most;
    KernelLaunch request{};
    request.kernel = &kernel_named(kSsdScan, {"ssd_scan_", variant, "_", dtype_name(dt)},
                                   {{kHasBias, config_.has_bias},
                                    {kHasSoftplus, config_.softplus},
                                    {kHasLengths, config_.has_lengths}});
    request.inputs = {&dt, &inputs[1], config_.has_bias ? &inputs[2] : &inputs[1],
                      config_.has_lengths ? &inputs[lengths_at()] : &inputs[1]};
    for (size_t i = count(); i < inputs.size(); ++i) {
      request.inputs.push_back(&inputs[i]);
    }
    request.outputs = {&outputs[0], &outputs[1]};
    request.params = &params;
    request.params_size = sizeof(params);
    request.grid = linear_grid(static_cast<int64_t>(dt.size()), kThreads);
    request.threadgroup = {kThreads, 1, 1};
    launch(request, stream());
  }

  // As Steps of simd/steps.cpp has them. `counts`: of the steps that are no padding, if there are.
  struct Composed {
    std::optional<mx::array> counts;
    mx::array x, given, size, decay;
  };

  mx::array rates_of(const Arrays& inputs) { return mx::expand_dims(inputs[1], 1, stream()); }

  Composed composed(const Arrays& inputs) {
    const mx::Stream s = stream();
    const mx::array zero(0.0f);
    std::optional<mx::array> counts;
    mx::array x = mx::astype(inputs[0], mx::float32, s);
    if (config_.has_lengths) {
      const mx::array at = mx::arange(0, x.shape(1), 1, mx::int32, s);
      counts = mx::less(mx::expand_dims(at, {0, 2}, s),
                        mx::expand_dims(inputs[lengths_at()], {1, 2}, s), s);
      x = choose(*counts, x, zero, s);
    }
    x = config_.has_bias ? mx::add(x, mx::expand_dims(inputs[2], 1, s), s) : x;
    const mx::array given = config_.softplus ? mx::logaddexp(x, zero, s) : x;
    mx::array size = given;
    if (config_.least > -INFINITY) {
      size = mx::maximum(size, mx::array(config_.least), s);
    }
    if (config_.most < INFINITY) {
      size = mx::minimum(size, mx::array(config_.most), s);
    }
    return {counts, x, given, size, mx::exp(mx::multiply(size, rates_of(inputs), s), s)};
  }

  const SsdStepsConfig config_;
};

// Inputs: further the gradients of decays and step sizes. Outputs: the gradient of dt + bias, and
// what sums up to that of A; float32.
class SsdStepsBackward : public SsdStepsPrimitive {
 public:
  using SsdStepsPrimitive::SsdStepsPrimitive;

  const char* kind() const override { return "SsdStepsBackward"; }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::array zero(0.0f);
    const Composed steps = composed(inputs);
    const mx::array d_exponent = mx::multiply(inputs[count()], steps.decay, s);
    mx::array d_x = mx::add(inputs[count() + 1], mx::multiply(d_exponent, rates_of(inputs), s), s);
    d_x = choose(mx::greater(steps.given, mx::array(config_.least), s), d_x, zero, s);
    d_x = choose(mx::less(steps.given, mx::array(config_.most), s), d_x, zero, s);
    d_x = config_.softplus ? mx::multiply(d_x, mx::sigmoid(steps.x, s), s) : d_x;
    const mx::array d_a = mx::multiply(d_exponent, steps.size, s);
    const auto counted = [&](const mx::array& x) {
      return steps.counts ? choose(*steps.counts, x, zero, s) : x;
    };
    return {counted(d_x), counted(d_a)};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    SsdStepsArgs args = arguments(inputs);
    args.d_decays = inputs[count()].data<float>();
    args.d_steps = inputs[count() + 1].data<float>();
    args.d_dt = outputs[0].data<float>();
    args.d_a = outputs[1].data<float>();
    run("steps_backward", args, ssd_steps_kernels()[kernel_dtype_of(inputs[0])].backward, inputs,
        outputs);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    launch_steps("steps_backward", inputs, outputs);
  }

 protected:
  Arrays again(Arrays inputs) override {
    return outputs_of(std::make_shared<SsdStepsBackward>(stream(), config_),
                      {mx::float32, mx::float32}, std::move(inputs));
  }
};

// Outputs: decays and step sizes.
class SsdSteps : public SsdStepsPrimitive {
 public:
  using SsdStepsPrimitive::SsdStepsPrimitive;

  const char* kind() const override { return "SsdSteps"; }

  Arrays compose(const Arrays& inputs) override {
    const Composed steps = composed(inputs);
    return {steps.decay, steps.size};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    SsdStepsArgs args = arguments(inputs);
    args.decays = outputs[0].data<float>();
    args.steps = outputs[1].data<float>();
    run("steps", args, ssd_steps_kernels()[kernel_dtype_of(inputs[0])].forward, inputs, outputs);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    launch_steps("steps", inputs, outputs);
  }

 protected:
  Arrays again(Arrays inputs) override {
    return outputs_of(std::make_shared<SsdSteps>(stream(), config_), {mx::float32, mx::float32},
                      std::move(inputs));
  }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    Arrays inputs = primals;
    inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
    const Arrays terms = outputs_of(std::make_shared<SsdStepsBackward>(stream(), config_),
                                    {mx::float32, mx::float32}, std::move(inputs));
    Arrays gradients;
    for (int i : argnums) {
      const auto at = static_cast<size_t>(i);
      if (config_.has_lengths && at == lengths_at()) {
        gradients.push_back(mx::zeros_like(primals[at], stream()));
      } else if (i == 0) {
        gradients.push_back(mx::astype(terms[0], primals[0].dtype(), stream()));
      } else {
        gradients.push_back(mx::sum(terms[i == 1 ? 1 : 0], 1, false, stream()));
      }
    }
    return gradients;
  }
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
  // One row for each of the batch, so that vmap may have others for its own.
  const auto per_batch = [&](const mx::array& x) {
    return mx::broadcast_to(x, {dt.shape(0), dt.shape(2)}, s);
  };
  Arrays inputs = {dt, per_batch(a)};
  if (bias) {
    inputs.push_back(per_batch(*bias));
  }
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

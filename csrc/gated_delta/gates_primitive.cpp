#include "gated_delta/gates_primitive.h"

#include "common/allocate.h"
#include "common/launch.h"
#include "common/select.h"
#include "common/trace.h"
#include "common/vmap_axis.h"
#include "gated_delta/gates_cpu.h"
#include "gated_delta/gates_gpu.h"

namespace mlx_anvil {

Arrays compose_gates(const GatesConfig& config, const Arrays& inputs, mx::Stream s) {
  const auto widened = [&](size_t i) { return mx::astype(inputs[i], mx::float32, s); };
  const bool per_channel = inputs[0].ndim() > inputs[1].ndim();
  mx::array speed = mx::exp(widened(2), s);
  speed = per_channel ? mx::expand_dims(speed, -1, s) : speed;
  const mx::array x = mx::add(widened(0), widened(3), s);
  const mx::array exponent =
      config.lower_bound
          ? mx::multiply(mx::array(*config.lower_bound), mx::sigmoid(mx::multiply(speed, x, s), s),
                         s)
          : mx::negative(mx::multiply(speed, mx::logaddexp(x, mx::array(0.0f), s), s), s);
  const mx::array rate = mx::sigmoid(widened(1), s);
  return {mx::exp(exponent, s), mx::multiply(rate, mx::array(config.rate_scale), s)};
}

std::pair<Arrays, std::vector<int>> GatesPrimitive::batched(const Arrays& inputs,
                                                            const std::vector<int>& axes) {
  if (axes[2] >= 0 || axes[3] >= 0) {
    return FusedPrimitive::batched(inputs, axes);
  }
  const int length = vmap_length(inputs, axes);
  Arrays rows = inputs;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!is_weight(i)) {
      rows[i] = repeated_over_vmap(inputs[i], axes[i], 0, length, stream());
    }
  }
  Arrays outputs = again(std::move(rows));
  return {std::move(outputs), std::vector<int>(2, 0)};
}

void GatesPrimitive::fill_arguments(DeltaGatesArgs& args, const Arrays& inputs) const {
  const GatesSizes sizes(inputs);
  args.dtype = kernel_dtype_of(inputs[0]);
  args.a = inputs[0].data<void>();
  args.b = inputs[1].data<void>();
  args.a_log = inputs[2].data<void>();
  args.dt_bias = inputs[3].data<void>();
  args.log_is_float32 = inputs[2].dtype() == mx::float32;
  args.bias_is_float32 = inputs[3].dtype() == mx::float32;
  args.rows = sizes.rows;
  args.heads = sizes.heads;
  args.channels = sizes.channels;
  args.is_bounded = config_.lower_bound.has_value();
  args.lower_bound = config_.lower_bound.value_or(0.0f);
  args.rate_scale = config_.rate_scale;
}

namespace {

class GatedDeltaGates : public GatesPrimitive {
 public:
  using GatesPrimitive::GatesPrimitive;

  const char* kind() const override { return "GatedDeltaGates"; }

  Arrays compose(const Arrays& inputs) override { return compose_gates(config_, inputs, stream()); }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape(), inputs[1].shape()};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    DeltaGatesForwardArgs args{};
    fill_arguments(args, inputs);
    args.g = outputs[0].data<float>();
    args.beta = outputs[1].data<float>();
    dispatch_cpu("", inputs, outputs, [args] { gated_delta_gates_cpu(args); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    gated_delta_gates_gpu(config_, inputs, outputs, stream());
  }

 protected:
  Arrays again(Arrays inputs) override {
    return apply_gates(config_, {inputs[0], inputs[1], inputs[2], inputs[3]}, stream());
  }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    const bool sums = std::any_of(argnums.begin(), argnums.end(), [](int i) { return i >= 2; });
    Arrays inputs = primals;
    inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
    return select(apply_gates_backward(config_, sums, std::move(inputs), stream()), argnums);
  }
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

#include <algorithm>

#include "causal_conv1d/cpu.h"
#include "causal_conv1d/gpu.h"
#include "causal_conv1d/primitive.h"
#include "common/allocate.h"
#include "common/vmap_axis.h"

namespace mlx_anvil {

namespace {

// Inputs: those of the call, d_y, d_new_state. Outputs: d_x, d_state if there is a state, and with
// `sums` d_weight and the d_bias of a bias.
class CausalConv1dBackward : public ConvPrimitive {
 public:
  CausalConv1dBackward(mx::Stream stream, const ConvConfig& config, bool sums)
      : ConvPrimitive(stream, config), sums_(sums) {}

  const char* kind() const override { return "CausalConv1dBackward"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return ConvPrimitive::is_equivalent(other) &&
           sums_ == static_cast<const CausalConv1dBackward&>(other).sums_;
  }

  Arrays compose(const Arrays& inputs) override {
    return compose_conv_backward(config_, sums_, view(inputs), d_y(inputs), d_new_state(inputs),
                                 stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const ConvView in = view(inputs);
    std::vector<mx::Shape> shapes = {in.x->shape()};
    if (in.state) {
      shapes.push_back(in.state->shape());
    }
    if (sums_) {
      shapes.push_back(in.weight->shape());
      if (in.bias) {
        shapes.push_back(in.bias->shape());
      }
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const ConvGradients to = gradients(outputs);
    if (is_empty(outputs)) {
      return;
    }
    ConvBackwardArgs args{};
    args.of = problem_of(inputs);
    const auto data = [](mx::array* x) { return x ? x->data<void>() : nullptr; };
    args.d_y = rows_of(d_y(inputs));
    args.d_new_state = rows_of(d_new_state(inputs));
    args.d_x = data(to.d_x);
    args.d_state = data(to.d_state);
    args.d_weight = data(to.d_weight);
    args.d_bias = data(to.d_bias);
    args.stream_d_x = to.d_x->size() > 0 && streams_rows(*to.d_x, 3);
    dispatch_cpu("backward", inputs, outputs, [args] { conv_backward_cpu(args); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const ConvGradients to = gradients(outputs);
    if (!is_empty(outputs)) {
      conv_backward_gpu(config_, view(inputs), d_y(inputs), d_new_state(inputs), to, stream());
    }
  }

 protected:
  // Each element of the batch has its own gradient of the weight.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const int count = vmap_length(inputs, axes);
    const Arrays folded = fold(inputs, axes, /*may_share=*/!sums_);
    Arrays outputs = apply_conv_backward(config_, sums_, folded, stream());
    const bool had_groups = inputs[1].ndim() - (axes[1] >= 0) == 3;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (i <= size_t(config_.has_state) || had_groups) {
        const int rest = count > 0 ? outputs[i].shape(0) / count : 0;
        outputs[i] = mx::unflatten(outputs[i], 0, {count, rest}, stream());
      }
    }
    return {outputs, std::vector<int>(outputs.size(), 0)};
  }

 private:
  const mx::array& d_y(const Arrays& inputs) const { return inputs[operand_count()]; }
  const mx::array& d_new_state(const Arrays& inputs) const { return inputs[operand_count() + 1]; }

  // Without channels, or without anything to sum or to write.
  static bool is_empty(const Arrays& outputs) {
    return std::all_of(outputs.begin(), outputs.end(),
                       [](const mx::array& x) { return x.size() == 0; });
  }

  ConvGradients gradients(Arrays& outputs) {
    allocate_dense(outputs, stream());
    const size_t weight = 1 + config_.has_state;
    return {&outputs[0], config_.has_state ? &outputs[1] : nullptr,
            sums_ ? &outputs[weight] : nullptr,
            sums_ && config_.has_bias ? &outputs[weight + 1] : nullptr};
  }

  const bool sums_;
};

}  // namespace

Arrays apply_conv_backward(const ConvConfig& config, bool sums, Arrays inputs, mx::Stream stream) {
  auto primitive = std::make_shared<CausalConv1dBackward>(stream, config, sums);
  std::string why_not;
  if (!can_launch_conv(inputs[0], stream, &why_not)) {
    note_fallback(kCausalConv1d, why_not);
    return primitive->compose(inputs);
  }
  const std::vector<mx::Dtype> dtypes(1 + config.has_state + sums * (1 + config.has_bias),
                                      inputs[0].dtype());
  return outputs_of(std::move(primitive), dtypes, std::move(inputs));
}

}  // namespace mlx_anvil

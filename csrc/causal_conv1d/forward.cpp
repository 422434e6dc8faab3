#include "causal_conv1d/cpu.h"
#include "causal_conv1d/gpu.h"
#include "causal_conv1d/primitive.h"
#include "common/allocate.h"
#include "common/vmap_axis.h"

namespace mlx_anvil {

namespace {

// Outputs: y, the new state.
class CausalConv1d : public ConvPrimitive {
 public:
  using ConvPrimitive::ConvPrimitive;

  const char* kind() const override { return "CausalConv1d"; }

  Arrays compose(const Arrays& inputs) override {
    return compose_conv(config_, view(inputs), stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape(), view(inputs).state_shape()};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    if (outputs[1].size() == 0) {
      return;
    }
    ConvForwardArgs args{};
    args.of = problem_of(inputs);
    args.y = outputs[0].data<void>();
    args.new_state = outputs[1].data<void>();
    args.stream_outputs = outputs[0].size() > 0 && streams_rows(outputs[0], 2);
    dispatch_cpu("forward", inputs, outputs, [args] { conv_forward_cpu(args); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    if (outputs[1].size() > 0) {
      conv_forward_gpu(config_, view(inputs), outputs, stream());
    }
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    bool sums = false;
    for (int i : argnums) {
      sums = sums || (i >= 1 && static_cast<size_t>(i) < state_at());
    }
    Arrays inputs = primals;
    inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
    const Arrays gradients = apply_conv_backward(config_, sums, std::move(inputs), stream());
    Arrays selected;
    for (int i : argnums) {
      const auto at = static_cast<size_t>(i);
      selected.push_back(at == 0             ? gradients[0]
                         : at < state_at()   ? gradients[at + config_.has_state]
                         : at < lengths_at() ? gradients[1]
                                             : mx::zeros_like(primals[at], stream()));
    }
    return selected;
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const int count = vmap_length(inputs, axes);
    Arrays outputs = apply_conv(config_, fold(inputs, axes, /*may_share=*/true), stream());
    for (mx::array& out : outputs) {
      out = mx::unflatten(out, 0, {count, count > 0 ? out.shape(0) / count : 0}, stream());
    }
    return {outputs, {0, 0}};
  }
};

}  // namespace

Arrays apply_conv(const ConvConfig& config, Arrays inputs, mx::Stream stream) {
  const std::vector<mx::Dtype> dtypes(2, inputs[0].dtype());
  auto primitive = std::make_shared<CausalConv1d>(stream, config);
  std::string why_not;
  if (!can_launch_conv(inputs[0], stream, &why_not)) {
    note_fallback(kCausalConv1d, why_not);
    return primitive->compose(inputs);
  }
  return outputs_of(std::move(primitive), dtypes, std::move(inputs));
}

}  // namespace mlx_anvil

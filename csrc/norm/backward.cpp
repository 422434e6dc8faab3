#include "common/allocate.h"
#include "common/vmap_axis.h"
#include "norm/apply.h"
#include "norm/gpu.h"
#include "norm/primitive.h"

namespace mlx_anvil {

namespace {

// `config` describes the forward call. Here its sum of x and residual arrives as h.
NormConfig without_residual(NormConfig config) {
  config.has_residual = false;
  return config;
}

class NormBackward : public NormPrimitive {
 public:
  NormBackward(mx::Stream stream,
               const NormConfig& config,
               const NormGradients& wanted,
               bool has_d_h)
      : NormPrimitive(stream, config), wanted_(wanted), has_d_h_(has_d_h) {}

  const char* kind() const override {
    return config_.centred ? "LayerNormBackward" : "RMSNormBackward";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!NormPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& that = static_cast<const NormBackward&>(other);
    return wanted_ == that.wanted_ && has_d_h_ == that.has_d_h_;
  }

  Arrays compose(const Arrays& inputs) override {
    return compose_norm_backward(config_, wanted_, operands(inputs), *d_y(inputs),
                                 d_h(inputs) ? std::optional(*d_h(inputs)) : std::nullopt,
                                 stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const NormView in = view(inputs);
    std::vector<mx::Shape> shapes(1 + config_.has_gate, in.x->shape());
    if (wanted_.weight) {
      shapes.push_back(in.weight->shape());
    }
    if (wanted_.bias) {
      shapes.push_back(in.bias->shape());
    }
    return shapes;
  }

  std::vector<mx::Dtype> output_dtypes(const Arrays& inputs) const {
    const NormView in = view(inputs);
    std::vector<mx::Dtype> dtypes(1 + config_.has_gate, in.x->dtype());
    if (wanted_.weight) {
      dtypes.push_back(in.weight->dtype());
    }
    if (wanted_.bias) {
      dtypes.push_back(in.bias->dtype());
    }
    return dtypes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const NormView in = view(inputs);
    const bool fresh = allocate_outputs(inputs, outputs);
    if (are_empty(outputs)) {
      return;
    }
    NormBackwardArgs args{};
    args.h = operand_of(in.x);
    args.gate = operand_of(in.gate);
    args.d_y = operand_of(d_y(inputs));
    args.d_h = operand_of(d_h(inputs));
    args.d_x = outputs[0].data<void>();
    args.d_gate = config_.has_gate ? outputs[1].data<void>() : nullptr;
    args.columns = in.x->shape(-1);
    args.eps = config_.eps;
    args.gate_is_sigmoid = config_.gate_is_sigmoid;
    args.stream_outputs = fresh && streams_rows(outputs[0], 3 + 2 * config_.has_gate + has_d_h_);
    const Vectors to = vectors(outputs);
    void* const d_weight = to.weight ? to.weight->data<void>() : nullptr;
    void* const d_bias = to.bias ? to.bias->data<void>() : nullptr;
    const NormProblem problem = problem_of(in);
    dispatch_cpu("backward", inputs, outputs, [problem, args, d_weight, d_bias] {
      norm_backward_cpu(problem, args, d_weight, d_bias);
    });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const NormView in = view(inputs);
    allocate_outputs(inputs, outputs);
    if (are_empty(outputs)) {
      return;
    }
    const Vectors to = vectors(outputs);
    NormBackwardArrays arrays{};
    arrays.d_y = d_y(inputs);
    arrays.d_h = d_h(inputs);
    arrays.d_x = &outputs[0];
    arrays.d_gate = config_.has_gate ? &outputs[1] : nullptr;
    arrays.d_weight = to.weight;
    arrays.d_bias = to.bias;
    norm_backward_gpu(config_, in, arrays, stream());
  }

 protected:
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override;

 private:
  struct Vectors {
    mx::array *weight, *bias;
  };

  const mx::array* d_y(const Arrays& inputs) const { return &inputs[operand_count()]; }
  const mx::array* d_h(const Arrays& inputs) const {
    return has_d_h_ ? &inputs[operand_count() + 1] : nullptr;
  }

  Vectors vectors(Arrays& outputs) const {
    const size_t at = 1 + config_.has_gate;
    return {wanted_.weight ? &outputs[at] : nullptr,
            wanted_.bias ? &outputs[at + wanted_.weight] : nullptr};
  }

  // Returns true if no row gradient reuses an input's memory.
  bool allocate_outputs(const Arrays& inputs, Arrays& outputs) {
    bool fresh = true;
    if (config_.has_gate) {
      fresh = allocate_or_reuse(outputs[1], {&inputs[gate_at()]}, stream());
    }
    fresh = allocate_or_reuse(outputs[0], {d_y(inputs), &inputs[0]}, stream()) && fresh;
    for (size_t i = 1 + config_.has_gate; i < outputs.size(); ++i) {
      allocate_or_reuse(outputs[i], {}, stream());
    }
    return fresh;
  }

  const NormGradients wanted_;
  const bool has_d_h_;
};

// Each batch element has its own weight gradient.
std::pair<Arrays, std::vector<int>> NormBackward::batched(const Arrays& inputs,
                                                          const std::vector<int>& axes) {
  const bool sums = wanted_.weight || wanted_.bias;
  NormConfig config = config_;
  config.has_residual = has_d_h_;
  const Arrays folded = fold(inputs, axes, /*may_share=*/!sums);
  Arrays outputs = apply_norm_backward(config, wanted_, folded, stream());
  // Unfolds [batch * groups, columns], for weights that already had groups.
  const bool had_groups = sums && inputs[weight_at()].ndim() - (axes[weight_at()] >= 0) == 2;
  const int batch = vmap_length(inputs, axes);
  for (size_t i = 1 + config_.has_gate; had_groups && i < outputs.size(); ++i) {
    outputs[i] = mx::unflatten(outputs[i], 0, {batch, outputs[i].shape(0) / batch}, stream());
  }
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

}  // namespace

Arrays apply_norm_backward(const NormConfig& config,
                           const NormGradients& wanted,
                           const Arrays& inputs,
                           mx::Stream stream) {
  auto primitive =
      std::make_shared<NormBackward>(stream, without_residual(config), wanted, config.has_residual);
  std::string why_not;
  if (!can_launch_norm(inputs[0], stream, &why_not)) {
    note_fallback(config.op(), why_not);
    return primitive->compose(inputs);
  }
  const std::vector<mx::Dtype> dtypes = primitive->output_dtypes(inputs);
  return outputs_of(std::move(primitive), dtypes, limit_rank(inputs, stream));
}

}  // namespace mlx_anvil

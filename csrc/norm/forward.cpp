#include "common/allocate.h"
#include "norm/apply.h"
#include "norm/gpu.h"
#include "norm/primitive.h"

namespace mlx_anvil {

namespace {

class NormForward : public NormPrimitive {
 public:
  using NormPrimitive::NormPrimitive;

  const char* kind() const override { return config_.centred ? "LayerNorm" : "RMSNorm"; }

  Arrays compose(const Arrays& inputs) override {
    return compose_norm(config_, operands(inputs), stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return std::vector<mx::Shape>(1 + config_.has_residual, inputs[0].shape());
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const NormView in = view(inputs);
    const bool fresh = allocate_outputs(in, outputs);
    if (are_empty(outputs)) {
      return;
    }
    NormForwardArgs args{};
    args.x = operand_of(in.x);
    args.residual = operand_of(in.residual);
    args.gate = operand_of(in.gate);
    args.y = outputs[0].data<void>();
    args.h = config_.has_residual ? outputs[1].data<void>() : nullptr;
    args.columns = in.x->shape(-1);
    args.eps = config_.eps;
    args.gate_is_sigmoid = config_.gate_is_sigmoid;
    const int arrays = 1 + config_.has_gate + 2 * config_.has_residual + 1;
    args.stream_outputs = fresh && streams_rows(outputs[0], arrays);
    const NormProblem problem = problem_of(in);
    dispatch_cpu("forward", inputs, outputs, [problem, args] { norm_forward_cpu(problem, args); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const NormView in = view(inputs);
    allocate_outputs(in, outputs);
    if (!are_empty(outputs)) {
      norm_forward_gpu(config_, in, outputs, stream());
    }
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override;

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const Arrays folded = fold(inputs, axes, /*may_share=*/true);
    return {apply_norm(config_, operands(folded), stream()),
            std::vector<int>(1 + config_.has_residual, 0)};
  }

 private:
  // Returns true if no output reuses an input's memory.
  bool allocate_outputs(const NormView& in, Arrays& outputs) {
    if (config_.has_residual) {  // in MLX, two outputs both keep all inputs alive, so none is
                                 // donatable
      allocate_dense(outputs, stream());
      return true;
    }
    return allocate_or_reuse(outputs[0], {in.x, in.gate}, stream());
  }
};

Arrays NormForward::gradient(const Arrays& primals,
                             const Arrays& cotangents,
                             const std::vector<int>& argnums,
                             const Arrays& outputs) {
  NormGradients wanted;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    wanted.weight = wanted.weight || (at >= weight_at() && at < bias_at());
    wanted.bias = wanted.bias || at >= bias_at();
  }
  Arrays inputs = {config_.has_residual ? outputs[1] : primals[0]};
  inputs.insert(inputs.end(), primals.begin() + static_cast<int64_t>(gate_at()), primals.end());
  inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
  const Arrays gradients = apply_norm_backward(config_, wanted, inputs, stream());

  const size_t weight = 1 + config_.has_gate, bias = weight + wanted.weight;
  Arrays selected;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    const size_t from = at < gate_at() ? 0 : at < weight_at() ? 1 : at < bias_at() ? weight : bias;
    selected.push_back(gradients[from]);
  }
  return selected;
}

}  // namespace

Arrays apply_norm(const NormConfig& config, NormInputs in, mx::Stream stream) {
  const std::vector<mx::Dtype> dtypes(1 + config.has_residual, in.x.dtype());
  Arrays inputs;
  inputs.reserve(5);
  inputs.push_back(std::move(in.x));
  for (auto* x : {&in.residual, &in.gate, &in.weight, &in.bias}) {
    if (*x) {
      inputs.push_back(*std::move(*x));
    }
  }
  auto primitive = std::make_shared<NormForward>(stream, config);
  std::string why_not;
  if (!can_launch_norm(inputs[0], stream, &why_not)) {
    note_fallback(config.op(), why_not);
    return primitive->compose(inputs);
  }
  return outputs_of(std::move(primitive), dtypes, limit_rank(std::move(inputs), stream));
}

}  // namespace mlx_anvil

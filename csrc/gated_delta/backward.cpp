#include <numeric>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/run_on_cpu.h"
#include "common/vmap_axis.h"
#include "gated_delta/cpu.h"
#include "gated_delta/gpu.h"
#include "gated_delta/primitive.h"

namespace mlx_anvil {

namespace {

// Inputs: those of the call, then the gradients of y, of the last state, and of other states.
class GatedDeltaBackward : public GatedDeltaPrimitive {
 public:
  using GatedDeltaPrimitive::GatedDeltaPrimitive;

  const char* kind() const override { return "GatedDeltaBackward"; }

  Arrays compose(const Arrays& inputs) override {
    const auto at = [&](size_t i) { return inputs.begin() + static_cast<int64_t>(i); };
    const Arrays primals(at(0), at(config_.lengths_at()));
    const auto forward = [&](const Arrays& values) {
      Arrays all = inputs;
      std::copy(values.begin(), values.end(), all.begin());
      return compose_gated_delta(config_, operands(all), stream());
    };
    Arrays gradients = mx::vjp(forward, primals, Arrays(at(config_.count()), inputs.end())).second;
    const std::vector<mx::Dtype> dtypes = output_dtypes(inputs);
    for (size_t i = 0; i < gradients.size(); ++i) {
      gradients[i] = mx::astype(gradients[i], dtypes[i], stream());
    }
    return gradients;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < config_.lengths_at(); ++i) {
      shapes.push_back(inputs[i].shape());
    }
    return shapes;
  }

  std::vector<mx::Dtype> output_dtypes(const Arrays& inputs) const {
    std::vector<mx::Dtype> dtypes(config_.lengths_at(), mx::float32);
    std::fill_n(dtypes.begin(), 3, inputs[0].dtype());
    if (config_.has_gate) {
      dtypes[config_.gate_at()] = inputs[0].dtype();
    }
    return dtypes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    DeltaBackwardArgs args{};
    fill_arguments(args, config_, operands(inputs));
    args.d_y = delta_view_of(inputs[config_.count()]);
    args.d_state_out = inputs[config_.count() + 1].data<float>();
    args.d_states = config_.returns_states ? inputs[config_.count() + 2].data<float>() : nullptr;
    args.d_q = outputs[0].data<void>();
    args.d_k = outputs[1].data<void>();
    args.d_v = outputs[2].data<void>();
    args.d_g = outputs[3].data<float>();
    args.d_beta = outputs[4].data<float>();
    args.d_state = config_.has_state ? outputs[GatedDeltaConfig::kState].data<float>() : nullptr;
    args.d_skip = config_.has_skip ? outputs[config_.skip_at()].data<float>() : nullptr;
    args.d_gate = config_.has_gate ? outputs[config_.gate_at()].data<void>() : nullptr;
    run_on_cpu(
        *this, inputs, outputs, [args] { gated_delta_backward_cpu(args); },
        [&] { return std::string(op()) + "_backward_" + to_text(inputs[0].dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    const auto gradients = inputs.begin() + static_cast<int64_t>(config_.count());
    gated_delta_backward_gpu(config_, operands(inputs), Arrays(gradients, inputs.end()), outputs,
                             stream());
  }

 protected:
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    return unfold(apply_gated_delta_backward(config_, fold(inputs, axes), stream()),
                  vmap_length(inputs, axes));
  }
};

}  // namespace

Arrays apply_gated_delta_backward(const GatedDeltaConfig& config,
                                  const Arrays& inputs,
                                  mx::Stream stream) {
  auto primitive = std::make_shared<GatedDeltaBackward>(stream, config);
  const std::vector<mx::Dtype> dtypes = primitive->output_dtypes(inputs);
  return outputs_of(std::move(primitive), dtypes, inputs);
}

}  // namespace mlx_anvil

#include <utility>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/run_on_cpu.h"
#include "common/siblings.h"
#include "common/vmap_axis.h"
#include "gated_delta/cpu.h"
#include "gated_delta/gpu.h"
#include "gated_delta/primitive.h"

namespace mlx_anvil {

namespace {

class GatedDelta : public GatedDeltaPrimitive {
 public:
  using GatedDeltaPrimitive::GatedDeltaPrimitive;

  const char* kind() const override { return "GatedDelta"; }

  Arrays compose(const Arrays& inputs) override {
    return compose_gated_delta(config_, operands(inputs), stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape &q = inputs[0].shape(), &v = inputs[2].shape();
    std::vector<mx::Shape> shapes = {v, {v[0], v[2], v[3], q[3]}};
    if (config_.returns_states) {
      shapes.push_back({v[0], inputs[config_.positions_at()].shape(1), v[2], v[3], q[3]});
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const SiblingsWithoutInputs released(inputs, outputs);
    allocate_outputs(inputs, outputs);
    DeltaForwardArgs args{};
    fill_arguments(args, config_, operands(inputs));
    args.y = outputs[0].data<void>();
    args.state_out = outputs[1].data<float>();
    args.states = config_.returns_states ? outputs[2].data<float>() : nullptr;
    run_on_cpu(
        *this, inputs, outputs, [args] { gated_delta_cpu(args); },
        [&] {
          return std::string(op()) +
                 (args.sizes.length <= kMostFewSteps ? "_step_" : "_sequence_") +
                 to_text(inputs[0].dtype());
        });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const SiblingsWithoutInputs released(inputs, outputs);
    allocate_outputs(inputs, outputs);
    gated_delta_gpu(config_, operands(inputs), outputs, stream());
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override;

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    return unfold(apply_gated_delta(config_, operands(fold(inputs, axes)), stream()),
                  vmap_length(inputs, axes));
  }

 private:
  // The new state takes the place of the old one if nothing else refers to that.
  void allocate_outputs(const Arrays& inputs, Arrays& outputs) {
    allocate_dense(outputs[0], stream());
    if (config_.has_state) {
      allocate_or_reuse(outputs[1], {&inputs[GatedDeltaConfig::kState]}, stream());
    } else {
      allocate_dense(outputs[1], stream());
    }
    if (config_.returns_states) {
      allocate_dense(outputs[2], stream());
    }
  }
};

Arrays GatedDelta::gradient(const Arrays& primals,
                            const Arrays& cotangents,
                            const std::vector<int>& argnums,
                            const Arrays&) {
  Arrays inputs = primals;
  inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
  const Arrays gradients = apply_gated_delta_backward(config_, inputs, stream());
  Arrays selected;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    selected.push_back(at >= config_.lengths_at()
                           ? mx::zeros_like(primals[at], stream())
                           : mx::astype(gradients[at], primals[at].dtype(), stream()));
  }
  return selected;
}

}  // namespace

Arrays apply_gated_delta(const GatedDeltaConfig& config, GatedDeltaInputs in, mx::Stream stream) {
  std::vector<mx::Dtype> dtypes = {in.q.dtype(), mx::float32};
  if (config.returns_states) {
    dtypes.push_back(mx::float32);
  }
  Arrays inputs;
  inputs.reserve(10);
  for (mx::array* x : {&in.q, &in.k, &in.v, &in.g, &in.beta}) {
    inputs.push_back(std::move(*x));
  }
  for (std::optional<mx::array>* x : {&in.state, &in.skip, &in.gate, &in.lengths, &in.positions}) {
    if (*x) {
      inputs.push_back(*std::move(*x));
    }
  }
  return outputs_of(std::make_shared<GatedDelta>(stream, config), dtypes, std::move(inputs));
}

}  // namespace mlx_anvil

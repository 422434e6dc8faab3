#include "common/allocate.h"
#include "gated_delta/gates_cpu.h"
#include "gated_delta/gates_gpu.h"
#include "gated_delta/gates_primitive.h"

namespace mlx_anvil {

namespace {

// Inputs: those of the call, d_g, d_beta. Outputs: d_a, d_b, and with `sums` d_A_log and d_dt_bias.
class GatedDeltaGatesBackward : public GatesPrimitive {
 public:
  GatedDeltaGatesBackward(mx::Stream stream, const GatesConfig& config, bool sums)
      : GatesPrimitive(stream, config), sums_(sums) {}

  const char* kind() const override { return "GatedDeltaGatesBackward"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return GatesPrimitive::is_equivalent(other) &&
           sums_ == static_cast<const GatedDeltaGatesBackward&>(other).sums_;
  }

  Arrays compose(const Arrays& inputs) override {
    const Arrays primals(inputs.begin(), inputs.begin() + count());
    const auto forward = [&](const Arrays& values) {
      Arrays all = inputs;
      std::copy(values.begin(), values.end(), all.begin());
      return compose_gates(config_, all, stream());
    };
    return mx::vjp(forward, primals, {inputs[4], inputs[5]}).second;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    std::for_each_n(inputs.begin(), count(),
                    [&](const mx::array& x) { shapes.push_back(x.shape()); });
    return shapes;
  }

  std::vector<mx::Dtype> output_dtypes(const Arrays& inputs) const {
    std::vector<mx::Dtype> dtypes;
    std::for_each_n(inputs.begin(), count(),
                    [&](const mx::array& x) { dtypes.push_back(x.dtype()); });
    return dtypes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    DeltaGatesBackwardArgs args{};
    fill_arguments(args, inputs);
    args.d_g = inputs[4].data<float>();
    args.d_beta = inputs[5].data<float>();
    args.d_a = outputs[0].data<void>();
    args.d_b = outputs[1].data<void>();
    void* const d_a_log = sums_ ? outputs[2].data<void>() : nullptr;
    void* const d_dt_bias = sums_ ? outputs[3].data<void>() : nullptr;
    dispatch_cpu("backward_", inputs, outputs, [args, d_a_log, d_dt_bias] {
      gated_delta_gates_backward_cpu(args, d_a_log, d_dt_bias);
    });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    gated_delta_gates_backward_gpu(config_, inputs, outputs, stream());
  }

 protected:
  Arrays again(Arrays inputs) override {
    return apply_gates_backward(config_, sums_, std::move(inputs), stream());
  }

  // Each element of the batch has sums of its own.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    return sums_ ? FusedPrimitive::batched(inputs, axes) : GatesPrimitive::batched(inputs, axes);
  }

 private:
  int count() const { return sums_ ? 4 : 2; }

  const bool sums_;
};

}  // namespace

Arrays apply_gates_backward(const GatesConfig& config,
                            bool sums,
                            Arrays inputs,
                            mx::Stream stream) {
  auto primitive = std::make_shared<GatedDeltaGatesBackward>(stream, config, sums);
  const std::vector<mx::Dtype> dtypes = primitive->output_dtypes(inputs);
  return outputs_of(std::move(primitive), dtypes, std::move(inputs));
}

}  // namespace mlx_anvil

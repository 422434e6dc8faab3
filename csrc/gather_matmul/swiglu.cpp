// The gated product of experts as a primitive. Inputs: x, w, scales and biases if affine of gate,
// then of up, the experts' biases of each if given, rhs, lhs if given.
#include <utility>

#include "common/allocate.h"
#include "gather_matmul/cpu.h"
#include "gather_matmul/gpu.h"
#include "gather_matmul/pairs.h"
#include "quantized_matmul/stepped_primitive.h"

namespace mlx_anvil {

namespace {

// Which inputs a primitive has.
struct SwigluParts {
  bool gate_bias, up_bias, lhs;

  bool operator==(const SwigluParts&) const = default;
};

// From ops with fused derivatives.
mx::array gated_in_steps(const char* op,
                         const QuantizedFormat& format,
                         const mx::array& x,
                         const ExpertMatrix& gate,
                         const ExpertMatrix& up,
                         const GateOptions& activation,
                         const PairIds& ids,
                         mx::Stream s) {
  return apply_gate(apply_gather_projection(op, format, x, gate, ids, s),
                    apply_gather_projection(op, format, x, up, ids, s), activation, s);
}

class GatherQuantizedSwiglu : public SteppedPrimitive {
 public:
  GatherQuantizedSwiglu(mx::Stream stream,
                        const char* op,
                        const QuantizedFormat& format,
                        const GateOptions& activation,
                        SwigluParts parts,
                        bool sorted)
      : SteppedPrimitive(stream, op, format),
        activation_(activation),
        parts_(parts),
        sorted_(sorted) {}

  const char* kind() const override { return "GatherQuantizedSwiglu"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& same = static_cast<const GatherQuantizedSwiglu&>(other);
    return format_ == same.format_ && activation_ == same.activation_ && parts_ == same.parts_ &&
           sorted_ == same.sorted_;
  }

  // In float32, rounded once.
  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::array x = mx::astype(inputs[0], mx::float32, s);
    const auto product = [&](const ExpertMatrix& expert) {
      return apply_gather_projection(op_, format_, x, expert, ids(inputs), s);
    };
    return {mx::astype(compose_gated(product(gate(inputs)), product(up(inputs)), activation_, s),
                       inputs[0].dtype(), s)};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = ids(inputs).rhs.shape();
    shape.push_back(inputs[0].shape(-2));
    shape.push_back(inputs[1].shape(-2));
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    GatherSwigluArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.format = format_;
    args.sizes = sizes(inputs);
    args.ids = pointers_of(ids(inputs));
    args.gate = mlx_anvil::pointers_of(weights_at(format_, inputs, 1));
    args.up = mlx_anvil::pointers_of(weights_at(format_, inputs, 1 + arrays_per_matrix()));
    args.gate_bias = parts_.gate_bias ? inputs[gate_bias_at()].data<void>() : nullptr;
    args.up_bias = parts_.up_bias ? inputs[up_bias_at()].data<void>() : nullptr;
    args.options = activation_;
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    dispatch_cpu("gather_quantized_swiglu", inputs, outputs, args, gather_quantized_swiglu_cpu);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (outputs[0].size() == 0) {
      outputs[0].set_data(allocate(0, stream()));
      return;
    }
    gather_quantized_swiglu_gpu(format_, sizes(inputs), inputs[0], weights_at(format_, inputs, 1),
                                weights_at(format_, inputs, 1 + arrays_per_matrix()),
                                parts_.gate_bias ? &inputs[gate_bias_at()] : nullptr,
                                parts_.up_bias ? &inputs[up_bias_at()] : nullptr, activation_,
                                ids(inputs), outputs[0], stream());
  }

 protected:
  mx::array in_steps(const Arrays& inputs) override {
    return gated_in_steps(op_, format_, inputs[0], gate(inputs), up(inputs), activation_,
                          ids(inputs), stream());
  }

 private:
  PairIds ids(const Arrays& inputs) const { return ids_of(inputs, parts_.lhs, sorted_); }
  size_t gate_bias_at() const { return 1 + 2 * arrays_per_matrix(); }
  size_t up_bias_at() const { return gate_bias_at() + parts_.gate_bias; }

  ExpertMatrix gate(const Arrays& inputs) const {
    return {matrix_at(format_, inputs, 1),
            parts_.gate_bias ? std::optional(inputs[gate_bias_at()]) : std::nullopt};
  }
  ExpertMatrix up(const Arrays& inputs) const {
    return {matrix_at(format_, inputs, 1 + arrays_per_matrix()),
            parts_.up_bias ? std::optional(inputs[up_bias_at()]) : std::nullopt};
  }

  GatherSizes sizes(const Arrays& inputs) const {
    GatherSizes sizes = gather_sizes(inputs[0], ids(inputs).rhs, matrix_count(inputs[1]));
    sizes.columns = inputs[0].shape(-1);
    sizes.outputs = inputs[1].shape(-2);
    return sizes;
  }

  const GateOptions activation_;
  const SwigluParts parts_;
  const bool sorted_;
};

}  // namespace

mx::array apply_gather_quantized_swiglu(const char* op,
                                        const QuantizedFormat& format,
                                        mx::array x,
                                        ExpertMatrix gate,
                                        ExpertMatrix up,
                                        const GateOptions& activation,
                                        PairIds ids,
                                        mx::Stream s) {
  GatherSizes sizes = gather_sizes(x, ids.rhs, matrix_count(gate.matrix.w));
  sizes.columns = x.shape(-1);
  sizes.outputs = gate.matrix.w.shape(-2);
  std::string why_not;
  if (for_gpu(s) && !can_launch_gather(sizes, s, &why_not)) {
    return gated_in_steps(op, format, x, gate, up, activation, ids, s);
  }
  const mx::Dtype dtype = x.dtype();
  const SwigluParts parts = {gate.bias.has_value(), up.bias.has_value(), ids.lhs.has_value()};
  Arrays inputs = inputs_with(std::move(x), std::move(gate.matrix));
  append(inputs, std::move(up.matrix));
  for (std::optional<mx::array>* bias : {&gate.bias, &up.bias}) {
    if (*bias) {
      inputs.push_back(**bias);
    }
  }
  append(inputs, ids);
  return output_of(
      std::make_shared<GatherQuantizedSwiglu>(s, op, format, activation, parts, ids.sorted), dtype,
      std::move(inputs));
}

}  // namespace mlx_anvil

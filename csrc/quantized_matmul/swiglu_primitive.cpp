#include "common/allocate.h"
#include "common/checks.h"
#include "quantized_matmul/cpu.h"
#include "quantized_matmul/mlx_route.h"
#include "quantized_matmul/stepped_primitive.h"

namespace mlx_anvil {

namespace {

class QuantizedSwiglu : public SteppedPrimitive {
 public:
  QuantizedSwiglu(mx::Stream stream, const QuantizedFormat& format, const GateOptions& activation)
      : SteppedPrimitive(stream, "quantized_swiglu", format), activation_(activation) {}

  const char* kind() const override { return "QuantizedSwiglu"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& same = static_cast<const QuantizedSwiglu&>(other);
    return format_ == same.format_ && activation_ == same.activation_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::array x = mx::astype(inputs[0], mx::float32, s);
    const auto product = [&](const QuantizedMatrix& matrix) {
      return compose_quantized_matmul(format_, QuantizedProduct::kTransposed, x, matrix, s);
    };
    return {mx::astype(compose_gated(product(gate(inputs)), product(up(inputs)), activation_, s),
                       inputs[0].dtype(), s)};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(-2);
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    QuantizedSwigluArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.format = format_;
    args.sizes = sizes(inputs);
    args.gate = pointers_of(gate_weights(inputs));
    args.up = pointers_of(up_weights(inputs));
    args.options = activation_;
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    dispatch_cpu("quantized_swiglu", inputs, outputs, args, quantized_swiglu_cpu);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    if (outputs[0].size() > 0) {
      quantized_swiglu_gpu(format_, sizes(inputs), inputs[0], gate_weights(inputs),
                           up_weights(inputs), activation_, outputs[0], stream());
    }
  }

 protected:
  mx::array in_steps(const Arrays& inputs) override {
    const auto product = [&](const QuantizedMatrix& matrix) {
      return apply_quantized_matmul(op_, format_, QuantizedProduct::kTransposed, inputs[0], matrix,
                                    stream());
    };
    return apply_gate(product(gate(inputs)), product(up(inputs)), activation_, stream());
  }

 private:
  QuantizedMatrix gate(const Arrays& inputs) const { return matrix_at(format_, inputs, 1); }
  QuantizedMatrix up(const Arrays& inputs) const {
    return matrix_at(format_, inputs, 1 + arrays_per_matrix());
  }
  QuantizedWeightArrays gate_weights(const Arrays& inputs) const {
    return weights_at(format_, inputs, 1);
  }
  QuantizedWeightArrays up_weights(const Arrays& inputs) const {
    return weights_at(format_, inputs, 1 + arrays_per_matrix());
  }
  QuantizedSizes sizes(const Arrays& inputs) const {
    return quantized_sizes(format_, inputs[0], inputs[1]);
  }

  const GateOptions activation_;
};

}  // namespace

mx::array apply_quantized_swiglu(const QuantizedFormat& format,
                                 mx::array x,
                                 QuantizedMatrix gate,
                                 QuantizedMatrix up,
                                 const GateOptions& activation,
                                 mx::Stream s) {
  constexpr const char* op = "quantized_swiglu";
  const QuantizedSizes sizes = quantized_sizes(format, x, gate.w);
  std::string why_not;
  const bool served = !for_gpu(s) || can_launch_quantized(sizes, s, &why_not);
  if (!served || sizes.rows > kQuantizedGemvRows ||
      (for_gpu(s) && mlx_gated_products_are_faster(format, sizes, x, s))) {
    const auto product = [&](const QuantizedMatrix& matrix) {
      return apply_quantized_matmul(op, format, QuantizedProduct::kTransposed, x, matrix, s);
    };
    return apply_gate(product(gate), product(up), activation, s);
  }
  const mx::Dtype dtype = x.dtype();
  Arrays inputs = inputs_with(std::move(x), std::move(gate));
  append(inputs, std::move(up));
  return output_of(std::make_shared<QuantizedSwiglu>(s, format, activation), dtype,
                   std::move(inputs));
}

}  // namespace mlx_anvil

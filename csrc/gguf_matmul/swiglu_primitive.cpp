#include "common/allocate.h"
#include "common/run_on_cpu.h"
#include "gguf_matmul/checks.h"
#include "gguf_matmul/compose.h"
#include "gguf_matmul/cpu.h"
#include "gguf_matmul/primitive.h"
#include "quantized_matmul/stepped_primitive.h"

namespace mlx_anvil {

namespace {

// Inputs: x, gate, up. For CPU streams: elsewhere the op is two products and the gate.
class GgufSwiglu : public InSteps<FusedPrimitive> {
 public:
  GgufSwiglu(mx::Stream stream, const GgufFormat& format, const GateOptions& activation)
      : InSteps<FusedPrimitive>(stream), format_(format), activation_(activation) {}

  const char* op() const override { return "quantized_swiglu"; }
  const char* kind() const override { return "GgufSwiglu"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& same = static_cast<const GgufSwiglu&>(other);
    return format_ == same.format_ && activation_ == same.activation_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const auto product = [&](const mx::array& w) {
      return compose_gguf_matmul(format_.kind, QuantizedProduct::kTransposed,
                                 mx::astype(inputs[0], mx::float32, s), w, s);
    };
    return {mx::astype(compose_gated(product(inputs[1]), product(inputs[2]), activation_, s),
                       inputs[0].dtype(), s)};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    GgufSwigluArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.kind = format_.kind;
    args.activation_bits = format_.activation_bits;
    args.sizes = gguf_sizes(format_.kind, inputs[0], inputs[1]);
    args.gate = inputs[1].data<uint8_t>();
    args.up = inputs[2].data<uint8_t>();
    args.options = activation_;
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    run_on_cpu(
        *this, inputs, outputs, [args] { gguf_swiglu_cpu(args); },
        [&] {
          return std::string("gguf_swiglu_") + to_text(outputs[0].dtype()) + "_" +
                 gguf_mode_name(format_.kind);
        });
  }

  void eval_gpu_kernels(const Arrays&, Arrays&) override {
    throw_internal_error(op(), "a node for the CPU was evaluated elsewhere.");
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  mx::array in_steps(const Arrays& inputs) override {
    const auto product = [&](const mx::array& w) {
      return apply_gguf_matmul(op(), format_, QuantizedProduct::kTransposed, inputs[0], w,
                               stream());
    };
    return apply_gate(product(inputs[1]), product(inputs[2]), activation_, stream());
  }

 private:
  const GgufFormat format_;
  const GateOptions activation_;
};

}  // namespace

mx::array apply_gguf_swiglu(const GgufFormat& format,
                            mx::array x,
                            mx::array gate,
                            mx::array up,
                            const GateOptions& activation,
                            mx::Stream s) {
  if (for_gpu(s) || gguf_sizes(format.kind, x, gate).rows > kQuantizedGemvRows) {
    const auto product = [&](const mx::array& w) {
      return apply_gguf_matmul("quantized_swiglu", format, QuantizedProduct::kTransposed, x, w, s);
    };
    return apply_gate(product(gate), product(up), activation, s);
  }
  const mx::Dtype dtype = x.dtype();
  return output_of(std::make_shared<GgufSwiglu>(s, format, activation), dtype,
                   {std::move(x), std::move(gate), std::move(up)});
}

}  // namespace mlx_anvil

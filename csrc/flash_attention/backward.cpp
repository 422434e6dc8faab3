#include "flash_attention/backward.h"

#include "common/allocate.h"
#include "flash_attention/compose.h"
#include "flash_attention/cpu.h"
#include "flash_attention/primitive.h"

namespace mlx_anvil {

namespace {

// Inputs: the operands, out, lse, d_out and optionally d_lse. Outputs: the wanted gradients.
class AttentionBackward : public AttentionPrimitive {
 public:
  AttentionBackward(mx::Stream stream,
                    const AttentionConfig& config,
                    const AttentionGradients& wanted,
                    bool has_d_lse)
      : AttentionPrimitive(stream, config), wanted_(wanted), has_d_lse_(has_d_lse) {}

  const char* kind() const override { return "FlashAttentionBackward"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!AttentionPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& that = static_cast<const AttentionBackward&>(other);
    return wanted_ == that.wanted_ && has_d_lse_ == that.has_d_lse_;
  }

  Arrays compose(const Arrays& inputs) override {
    const size_t at = operand_count();
    return compose_attention_backward(config_, operands(inputs), inputs[at], inputs[at + 1],
                                      inputs[at + 2], d_lse(inputs), wanted_, stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape &q = inputs[0].shape(), &k = inputs[1].shape(), &v = inputs[2].shape();
    std::vector<mx::Shape> shapes;
    if (wanted_.q) {
      shapes.push_back(q);
    }
    if (wanted_.kv) {
      shapes.push_back(k);
      shapes.push_back(v);
    }
    if (wanted_.mask) {
      shapes.push_back({q[0], q[1], q[2], k[2]});
    }
    if (wanted_.sinks) {
      shapes.push_back({q[0], q[1]});
    }
    return shapes;
  }

  std::vector<mx::Dtype> output_dtypes(const Arrays& inputs) const {
    std::vector<mx::Dtype> dtypes(wanted_.q + 2 * wanted_.kv, inputs[0].dtype());
    dtypes.resize(dtypes.size() + wanted_.mask + wanted_.sinks, mx::float32);
    return dtypes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const AttentionInputs in = operands(inputs);
    const Outputs to = allocate_outputs(in, outputs);
    const size_t at = operand_count();
    AttentionBackwardArgs args{};
    fill_operands(args, config_, in);
    args.out = view_of(inputs[at]);
    args.lse = inputs[at + 1].data<float>();
    args.lse_stride = args.sizes.q_len;
    args.d_out = view_of(inputs[at + 2]);
    if (has_d_lse_) {
      const mx::array& d_lse = inputs[at + 3];
      args.d_lse = d_lse.data<float>();
      std::copy(d_lse.strides().begin(), d_lse.strides().end(), args.d_lse_strides);
    }
    args.d_q = to.q ? output_of(*to.q) : AttentionOutput{};
    args.d_k = to.k ? output_of(*to.k) : AttentionOutput{};
    args.d_v = to.v ? output_of(*to.v) : AttentionOutput{};
    if (to.mask) {
      args.d_mask = to.mask->data<float>();
      std::copy_n(to.mask->strides().begin(), 3, args.d_mask_strides);
    }
    args.d_sinks = to.sinks ? to.sinks->data<float>() : nullptr;
    dispatch_cpu("backward", inputs, outputs, args, attention_backward_cpu);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const auto [config, in] = gpu_operands(config_, operands(inputs), true, stream());
    const Outputs to = allocate_outputs(in, outputs);
    const size_t at = operand_count();
    const AttentionBackwardArrays arrays{.in = in,
                                         .out = &inputs[at],
                                         .lse = &inputs[at + 1],
                                         .d_out = &inputs[at + 2],
                                         .d_lse = has_d_lse_ ? &inputs[at + 3] : nullptr,
                                         .d_q = to.q,
                                         .d_k = to.k,
                                         .d_v = to.v,
                                         .d_mask = to.mask,
                                         .d_sinks = to.sinks};
    attention_backward_gpu(config, sizes_of(in), arrays, stream());
  }

 protected:
  // The kernels read lse as dense rows. Under vmap it can be a broadcast view.
  bool wants_dense(size_t input) const override {
    return input == operand_count() + 1 || AttentionPrimitive::wants_dense(input);
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override;

 private:
  struct Outputs {
    mx::array *q = nullptr, *k = nullptr, *v = nullptr, *mask = nullptr, *sinks = nullptr;
  };

  std::optional<mx::array> d_lse(const Arrays& inputs) const {
    return has_d_lse_ ? std::optional(inputs[operand_count() + 3]) : std::nullopt;
  }

  Outputs allocate_outputs(const AttentionInputs& in, Arrays& outputs) {
    Outputs to;
    size_t next = 0;
    if (wanted_.q) {
      to.q = &outputs[next++];
      allocate_like(*to.q, in.q, stream());
    }
    if (wanted_.kv) {
      to.k = &outputs[next++];
      to.v = &outputs[next++];
      allocate_like(*to.k, in.k, stream());
      allocate_like(*to.v, in.v, stream());
    }
    if (wanted_.mask) {
      to.mask = &outputs[next++];
      to.mask->set_data(allocate(to.mask->nbytes(), stream()));
    }
    if (wanted_.sinks) {
      to.sinks = &outputs[next++];
      to.sinks->set_data(allocate(to.sinks->nbytes(), stream()));
    }
    return to;
  }

  const AttentionGradients wanted_;
  const bool has_d_lse_;
};

std::pair<Arrays, std::vector<int>> AttentionBackward::batched(const Arrays& inputs,
                                                               const std::vector<int>& axes) {
  const BatchFold batch(inputs, axes, stream());
  Arrays outputs;
  for (const mx::array& x : apply_attention_backward(config_, wanted_, fold(batch, inputs, axes),
                                                     has_d_lse_, stream())) {
    outputs.push_back(batch.unfold(x));
  }
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

}  // namespace

Arrays apply_attention_backward(const AttentionConfig& config,
                                const AttentionGradients& wanted,
                                const Arrays& inputs,
                                bool has_d_lse,
                                mx::Stream stream) {
  auto primitive = std::make_shared<AttentionBackward>(stream, config, wanted, has_d_lse);
  const std::vector<mx::Dtype> dtypes = primitive->output_dtypes(inputs);
  return outputs_of(std::move(primitive), dtypes, inputs);
}

}  // namespace mlx_anvil

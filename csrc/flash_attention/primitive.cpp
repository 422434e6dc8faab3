#include "flash_attention/primitive.h"

#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/isa.h"
#include "common/trace.h"
#include "flash_attention/gpu.h"
#include "flash_attention/native.h"
#include "flash_attention/operands.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_anvil {

namespace {

constexpr const char* kOp = "flash_attention";

// ---- vmap --------------------------------------------------------------------------------------

// vmap's axis becomes part of the batch: [n, batch, ...] -> [n * batch, ...].
class BatchFold {
 public:
  BatchFold(const Arrays& inputs, const std::vector<int>& axes, mx::Stream stream)
      : batch_(inputs[0].shape(axes[0] == 0 ? 1 : 0)), stream_(stream) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      count_ = axes[i] < 0 ? count_ : inputs[i].shape(axes[i]);
    }
  }

  // An input without vmap's axis is repeated, unless it may stay of length 1 (`stretches`).
  mx::array fold(const mx::array& x, int axis, bool stretches) const {
    if (axis < 0 && stretches && x.shape(0) == 1) {
      return x;
    }
    const mx::array front =
        axis < 0 ? mx::expand_dims(x, 0, stream_) : mx::moveaxis(x, axis, 0, stream_);
    mx::Shape shape = front.shape();
    shape[0] = count_;
    shape[1] = batch_;
    return mx::flatten(mx::broadcast_to(front, shape, stream_), 0, 1, stream_);
  }

  mx::array unfold(const mx::array& x) const {
    return mx::unflatten(x, 0, {count_, batch_}, stream_);
  }

 private:
  int count_ = 1;
  int batch_;
  mx::Stream stream_;
};

// ---- what both primitives share: the first inputs are q, k, v, the mask, the sinks
// ---------------

class AttentionPrimitive : public FusedPrimitive {
 public:
  AttentionPrimitive(mx::Stream stream, const AttentionConfig& config)
      : FusedPrimitive(stream), config_(config) {}

  const char* op() const override { return kOp; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const AttentionPrimitive&>(other).config_;
  }

 protected:
  bool has_mask() const { return config_.mask != AttentionMask::kNone; }
  size_t mask_at() const { return 3; }
  size_t sinks_at() const { return 3 + has_mask(); }
  size_t operand_count() const { return 3 + has_mask() + config_.has_sinks; }

  AttentionInputs operands(const Arrays& inputs) const {
    AttentionInputs in{inputs[0], inputs[1], inputs[2], std::nullopt, std::nullopt};
    if (has_mask()) {
      in.mask = inputs[mask_at()];
    }
    if (config_.has_sinks) {
      in.sinks = inputs[sinks_at()];
    }
    return in;
  }

  // With the mask and the sinks as a kernel reads them; for use in an evaluation.
  AttentionInputs stretched_operands(const Arrays& inputs) const {
    AttentionInputs in = operands(inputs);
    const mx::Shape &q = in.q.shape(), &k = in.k.shape();
    if (in.mask) {
      in.mask = stretched(*in.mask, {q[0], q[1], q[2], k[2]});
    }
    if (in.sinks) {
      in.sinks = stretched(*in.sinks, {q[0], q[1]});
    }
    return in;
  }

  Arrays fold(const BatchFold& batch, const Arrays& inputs, const std::vector<int>& axes) const {
    Arrays folded;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool stretches = i >= 3 && i < operand_count();
      folded.push_back(batch.fold(inputs[i], axes[i], stretches));
    }
    return folded;
  }

  static void set_operands(AttentionArrays& arrays, const AttentionInputs& in) {
    arrays.q = &in.q;
    arrays.k = &in.k;
    arrays.v = &in.v;
    arrays.mask = in.mask ? &*in.mask : nullptr;
    arrays.sinks = in.sinks ? &*in.sinks : nullptr;
  }

  // Runs `kernel(args)` on the stream, with all arrays registered.
  template <class Args>
  void dispatch_native(const char* variant,
                       const Arrays& inputs,
                       Arrays& outputs,
                       const Args& args,
                       void (*kernel)(const Args&)) {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& input : inputs) {
      encoder.set_input_array(input);
    }
    for (mx::array& output : outputs) {
      encoder.set_output_array(output);
    }
    encoder.dispatch([args, kernel] { kernel(args); });
    if (tracing()) {
      const std::string name = std::string(kOp) + "_" + variant + "_" + to_text(inputs[0].dtype()) +
                               "_d" + std::to_string(inputs[0].shape(3));
      const std::string device = std::string("cpu (") + isa_name(current_isa()) + ")";
      record({TraceEvent::Kind::kKernel, kOp, name, device, {}, {}, ""});
    }
  }

  const AttentionConfig config_;
};

// ---- gradients from what the forward saved
// -------------------------------------------------------

// Inputs: the operands, out, lse, d_out and perhaps d_lse. Outputs: the gradients that are wanted.
class AttentionBackward : public AttentionPrimitive {
 public:
  AttentionBackward(mx::Stream stream,
                    const AttentionConfig& config,
                    const AttentionGradients& wanted,
                    bool has_d_lse)
      : AttentionPrimitive(stream, config), wanted_(wanted), has_d_lse_(has_d_lse) {}

  const char* name() const override { return "FlashAttentionBackward"; }

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

  void eval_native(const Arrays& inputs, Arrays& outputs) override {
    const AttentionInputs in = stretched_operands(inputs);
    const Outputs to = allocate_outputs(in, outputs);
    const size_t at = operand_count();
    AttentionBackwardArgs args{};
    fill_operands(args, config_, in);
    args.out = view_of(inputs[at]);
    args.lse = inputs[at + 1].data<float>();
    args.d_out = view_of(inputs[at + 2]);
    if (has_d_lse_) {
      const mx::array& d_lse = inputs[at + 3];
      args.d_lse = d_lse.data<float>();
      std::copy(d_lse.strides().begin(), d_lse.strides().end(), args.d_lse_strides);
    }
    args.d_q = to.q ? output_of(*to.q) : AttentionOutput{};
    args.d_k = to.k ? output_of(*to.k) : AttentionOutput{};
    args.d_v = to.v ? output_of(*to.v) : AttentionOutput{};
    args.d_mask = to.mask ? to.mask->data<float>() : nullptr;
    args.d_sinks = to.sinks ? to.sinks->data<float>() : nullptr;
    dispatch_native("backward", inputs, outputs, args, attention_backward_native);
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    const AttentionInputs in = stretched_operands(inputs);
    const Outputs to = allocate_outputs(in, outputs);
    const size_t at = operand_count();
    AttentionBackwardArrays arrays{};
    set_operands(arrays, in);
    arrays.out = &inputs[at];
    arrays.lse = &inputs[at + 1];
    arrays.d_out = &inputs[at + 2];
    arrays.d_lse = has_d_lse_ ? &inputs[at + 3] : nullptr;
    arrays.d_q = to.q;
    arrays.d_k = to.k;
    arrays.d_v = to.v;
    arrays.d_mask = to.mask;
    arrays.d_sinks = to.sinks;
    attention_backward_gpu(config_, sizes_of(in), arrays, stream());
  }

 protected:
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
      allocate_like(*to.q, in.q, device());
    }
    if (wanted_.kv) {
      to.k = &outputs[next++];
      to.v = &outputs[next++];
      allocate_like(*to.k, in.k, device());
      allocate_like(*to.v, in.v, device());
    }
    if (wanted_.mask) {
      to.mask = &outputs[next++];
      to.mask->set_data(allocate(to.mask->nbytes(), device()));
    }
    if (wanted_.sinks) {
      to.sinks = &outputs[next++];
      to.sinks->set_data(allocate(to.sinks->nbytes(), device()));
    }
    return to;
  }

  const AttentionGradients wanted_;
  const bool has_d_lse_;
};

Arrays apply_backward(const AttentionConfig& config,
                      const AttentionGradients& wanted,
                      const Arrays& inputs,
                      bool has_d_lse,
                      mx::Stream stream) {
  auto primitive = std::make_shared<AttentionBackward>(stream, config, wanted, has_d_lse);
  const std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  const std::vector<mx::Dtype> dtypes = primitive->output_dtypes(inputs);
  return mx::array::make_arrays(shapes, dtypes, primitive, inputs);
}

std::pair<Arrays, std::vector<int>> AttentionBackward::batched(const Arrays& inputs,
                                                               const std::vector<int>& axes) {
  const BatchFold batch(inputs, axes, stream());
  Arrays outputs;
  for (const mx::array& x :
       apply_backward(config_, wanted_, fold(batch, inputs, axes), has_d_lse_, stream())) {
    outputs.push_back(batch.unfold(x));
  }
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

// ---- forward
// -------------------------------------------------------------------------------------

class AttentionForward : public AttentionPrimitive {
 public:
  AttentionForward(mx::Stream stream, const AttentionConfig& config, bool with_lse)
      : AttentionPrimitive(stream, config), with_lse_(with_lse) {}

  const char* name() const override { return "FlashAttention"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return AttentionPrimitive::is_equivalent(other) &&
           with_lse_ == static_cast<const AttentionForward&>(other).with_lse_;
  }

  Arrays compose(const Arrays& inputs) override {
    Arrays outputs = compose_attention(config_, operands(inputs), stream());
    if (!with_lse_) {
      outputs.pop_back();
    }
    return outputs;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape& q = inputs[0].shape();
    std::vector<mx::Shape> shapes = {{q[0], q[1], q[2], inputs[2].shape(3)}};
    if (with_lse_) {
      shapes.push_back({q[0], q[1], q[2]});
    }
    return shapes;
  }

  void eval_native(const Arrays& inputs, Arrays& outputs) override {
    const AttentionInputs in = stretched_operands(inputs);
    allocate_outputs(in, outputs);
    AttentionForwardArgs args{};
    fill_operands(args, config_, in);
    args.out = output_of(outputs[0]);
    args.lse = with_lse_ ? outputs[1].data<float>() : nullptr;
    dispatch_native(args.sizes.q_len <= kDecodeRows ? "decode" : "forward", inputs, outputs, args,
                    attention_forward_native);
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    const AttentionInputs in = stretched_operands(inputs);
    allocate_outputs(in, outputs);
    AttentionForwardArrays arrays{};
    set_operands(arrays, in);
    arrays.out = &outputs[0];
    arrays.lse = with_lse_ ? &outputs[1] : nullptr;
    attention_forward_gpu(config_, sizes_of(in), arrays, stream());
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override;

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const BatchFold batch(inputs, axes, stream());
    Arrays outputs;
    for (const mx::array& x :
         apply_attention(config_, operands(fold(batch, inputs, axes)), with_lse_, stream())) {
      outputs.push_back(batch.unfold(x));
    }
    return {outputs, std::vector<int>(outputs.size(), 0)};
  }

 private:
  void allocate_outputs(const AttentionInputs& in, Arrays& outputs) {
    allocate_like(outputs[0], in.q, device());
    if (with_lse_) {
      outputs[1].set_data(allocate(outputs[1].nbytes(), device()));
    }
  }

  const bool with_lse_;
};

// Sums `gradient` over the axes along which `input` was stretched.
mx::array sum_to(const mx::array& gradient, const mx::array& input, mx::Stream stream) {
  std::vector<int> axes;
  for (int axis = 0; axis < static_cast<int>(input.ndim()); ++axis) {
    if (input.shape(axis) == 1 && gradient.shape(axis) != 1) {
      axes.push_back(axis);
    }
  }
  const mx::array sum = axes.empty() ? gradient : mx::sum(gradient, axes, true, stream);
  return mx::astype(sum, input.dtype(), stream);
}

Arrays AttentionForward::gradient(const Arrays& primals,
                                  const Arrays& cotangents,
                                  const std::vector<int>& argnums,
                                  const Arrays& outputs) {
  const AttentionInputs in = operands(primals);
  if (const char* why_not =
          why_not_fused(in.q.shape(3), in.v.shape(3), in.q.shape(2), /*gradient=*/true)) {
    return FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
  }
  // Nothing comes back through a bool mask.
  const auto is_bool_mask = [&](size_t at) {
    return config_.mask == AttentionMask::kBool && at == mask_at();
  };
  AttentionGradients wanted;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    bool& slot = at == 0            ? wanted.q
                 : at < 3           ? wanted.kv
                 : at == sinks_at() ? wanted.sinks
                                    : wanted.mask;
    slot = slot || !is_bool_mask(at);
  }
  // Differentiated although nothing at the call said so: only then is the forward run again.
  const Arrays saved = with_lse_ ? outputs : apply_attention(config_, in, true, stream());

  Arrays inputs = primals;
  inputs.push_back(saved[0]);
  inputs.push_back(mx::contiguous(saved[1], false, stream()));
  inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
  const Arrays gradients = apply_backward(config_, wanted, inputs, with_lse_, stream());

  const size_t kv = wanted.q, mask = kv + 2 * wanted.kv, sinks = mask + wanted.mask;
  Arrays selected;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    if (is_bool_mask(at)) {
      selected.push_back(mx::zeros_like(primals[at], stream()));
      continue;
    }
    const size_t from = at == 0 ? 0 : at < 3 ? kv + at - 1 : at == sinks_at() ? sinks : mask;
    selected.push_back(at < 3 ? gradients[from] : sum_to(gradients[from], primals[at], stream()));
  }
  return selected;
}

}  // namespace

const char* why_not_fused(int head_dim, int v_head_dim, int q_len, bool gradient) {
  const int larger = std::max(head_dim, v_head_dim);
  if (larger <= kMaxHeadDim) {
    return nullptr;
  }
  if (gradient) {
    return "the gradient has kernels for head dims up to 256";
  }
  return larger <= kMaxDecodeHeadDim && q_len <= kDecodeRows
             ? nullptr
             : "there are kernels for head dims up to 256, and up to 512 for at most 8 queries";
}

Arrays apply_attention(const AttentionConfig& config,
                       const AttentionInputs& in,
                       bool with_lse,
                       mx::Stream stream) {
  Arrays inputs = {in.q, in.k, in.v};
  if (in.mask) {
    inputs.push_back(*in.mask);
  }
  if (in.sinks) {
    inputs.push_back(*in.sinks);
  }
  auto primitive = std::make_shared<AttentionForward>(stream, config, with_lse);
  const std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  std::vector<mx::Dtype> dtypes = {in.q.dtype(), mx::float32};
  dtypes.resize(shapes.size(), mx::float32);
  return mx::array::make_arrays(shapes, dtypes, primitive, inputs);
}

}  // namespace mlx_anvil

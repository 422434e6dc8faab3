#include "flash_attention/forward.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/allocate.h"
#include "common/mlx_ops.h"
#include "flash_attention/backward.h"
#include "flash_attention/compose.h"
#include "flash_attention/cpu.h"
#include "flash_attention/mlx_route.h"
#include "flash_attention/primitive.h"

namespace mlx_anvil {

namespace {

class AttentionForward : public AttentionPrimitive {
 public:
  AttentionForward(mx::Stream stream, const AttentionConfig& config, bool with_lse)
      : AttentionPrimitive(stream, config), with_lse_(with_lse) {}

  const char* kind() const override { return "FlashAttention"; }

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

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const AttentionInputs in = stretched_operands(inputs);
    allocate_outputs(in, outputs);
    AttentionForwardArgs args{};
    fill_operands(args, config_, in);
    args.out = output_of(outputs[0]);
    args.lse = with_lse_ ? outputs[1].data<float>() : nullptr;
    dispatch_cpu(args.sizes.q_len <= kDecodeRows ? "decode" : "forward", inputs, outputs, args,
                 attention_forward_cpu);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (!with_lse_ && run_mlx(inputs, outputs[0])) {
      return;
    }
    const AttentionInputs in = stretched_operands(inputs);
    allocate_outputs(in, outputs);
    const AttentionForwardArrays arrays{in, &outputs[0], with_lse_ ? &outputs[1] : nullptr};
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
    allocate_like(outputs[0], in.q, stream());
    if (with_lse_) {
      outputs[1].set_data(allocate(outputs[1].nbytes(), stream()));
    }
  }

  // Decided here, where shapes are known and no transformation sees the graph.
  bool run_mlx(const Arrays& inputs, mx::array& out) {
    const auto kernel = faster_mlx_attention(config_, operands(inputs), stream());
    if (kernel) {
      const auto graph = [this](const Arrays& in) {
        return mlx_attention(config_, operands(in), stream());
      };
      run_mlx_kernel(op(), *kernel, graph, inputs, out, stream());
    }
    return kernel.has_value();
  }

  const bool with_lse_;
};

// Returns true if there may be rows that see no key.
bool may_be_blind(const AttentionConfig& config, const AttentionInputs& in) {
  const int64_t first = in.k.shape(2) - in.q.shape(2);  // the position of the first query
  return in.q.size() > 0 && (config.mask != AttentionMask::kNone || in.k.shape(2) == 0 ||
                             first + config.window_right < 0);
}

// Rows that see no key, as far as the results tell. With sinks they have out = 0 and, almost, lse =
// sink, as have some that see keys with tiny weights.
mx::array blind_rows(const mx::array& out,
                     const mx::array& lse,
                     const std::optional<mx::array>& sinks,
                     mx::Stream s) {
  if (!sinks) {
    return mx::equal(lse, mx::array(-std::numeric_limits<float>::infinity()), s);
  }
  const mx::array sink = mx::expand_dims(mx::astype(*sinks, mx::float32, s), -1, s);
  return mx::logical_and(mx::isclose(lse, sink, 1e-6, 1e-6, false, s),
                         mx::logical_not(mx::any(out, -1, false, s), s), s);
}

// The gradients of a call's results without those of rows that see no key, where the kernels
// multiply by weights of 0: an infinite one would become NaN.
struct SeenGradients {
  mx::array d_out;
  std::optional<mx::array> d_lse;
  std::optional<mx::array> d_lse_of_sinks;  // cleared rows of d_lse, each that of its sink
};

SeenGradients of_seeing_rows(const mx::array& d_out,
                             const std::optional<mx::array>& d_lse,
                             const mx::array& out,
                             const mx::array& lse,
                             const std::optional<mx::array>& sinks,
                             mx::Stream s) {
  const mx::array blind = blind_rows(out, lse, sinks, s);
  mx::array cleared = blind;
  std::optional<mx::array> seen_d_lse = d_lse, of_sinks;
  if (sinks) {  // rows with finite gradients stay as they are
    const auto infinite = [&](const mx::array& x) {
      return mx::logical_and(blind, mx::logical_not(mx::isfinite(x, s), s), s);
    };
    cleared = infinite(mx::sum(d_out, -1, false, s));
    if (d_lse) {  // the kernels clear it where lse is -inf
      const mx::array alone = mx::logical_and(infinite(*d_lse), mx::isfinite(lse, s), s);
      seen_d_lse = choose(alone, mx::array(0.0f), *d_lse, s);
      of_sinks = choose(alone, *d_lse, mx::array(0.0f), s);
    }
  }
  return {choose(mx::expand_dims(cleared, -1, s), mx::array(0, d_out.dtype()), d_out, s),
          seen_d_lse, of_sinks};
}

Arrays AttentionForward::gradient(const Arrays& primals,
                                  const Arrays& cotangents,
                                  const std::vector<int>& argnums,
                                  const Arrays& outputs) {
  const AttentionInputs in = operands(primals);
  if (const char* why_not =
          why_not_fused(in.q.shape(3), in.v.shape(3), in.q.shape(2), /*gradient=*/true)) {
    note_fallback(op(), why_not);
    return FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
  }
  // A bool mask has no gradient.
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
  // Without a saved lse, nothing at the call indicated a gradient. The forward must run again.
  const Arrays saved = with_lse_ ? outputs : apply_attention(config_, in, true, stream());

  Arrays inputs = primals;
  inputs.insert(inputs.end(), saved.begin(), saved.end());
  inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
  const size_t d_out = primals.size() + 2, d_lse = d_out + 1;
  std::optional<mx::array> d_lse_of_sinks;
  if (may_be_blind(config_, in)) {
    const SeenGradients seen =
        of_seeing_rows(inputs[d_out], with_lse_ ? std::optional(inputs[d_lse]) : std::nullopt,
                       saved[0], saved[1], in.sinks, stream());
    inputs[d_out] = seen.d_out;
    if (seen.d_lse) {
      inputs[d_lse] = *seen.d_lse;
    }
    d_lse_of_sinks = seen.d_lse_of_sinks;
  }
  Arrays gradients = apply_attention_backward(config_, wanted, inputs, with_lse_, stream());

  const size_t kv = wanted.q, mask = kv + 2 * wanted.kv, sinks = mask + wanted.mask;
  if (wanted.sinks && d_lse_of_sinks) {
    gradients[sinks] =
        mx::add(gradients[sinks], mx::sum(*d_lse_of_sinks, -1, false, stream()), stream());
  }
  Arrays selected;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    if (is_bool_mask(at)) {
      selected.push_back(mx::zeros_like(primals[at], stream()));
      continue;
    }
    const size_t from = at == 0 ? 0 : at < 3 ? kv + at - 1 : at == sinks_at() ? sinks : mask;
    selected.push_back(mx::astype(sum_to(gradients[from], primals[at].shape(), stream()),
                                  primals[at].dtype(), stream()));
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
                       AttentionInputs in,
                       bool with_lse,
                       mx::Stream stream) {
  std::vector<mx::Dtype> dtypes = {in.q.dtype()};
  if (with_lse) {
    dtypes.push_back(mx::float32);
  }
  Arrays inputs;
  inputs.reserve(5);
  for (mx::array* x : {&in.q, &in.k, &in.v}) {
    inputs.push_back(std::move(*x));
  }
  for (std::optional<mx::array>* x : {&in.mask, &in.sinks}) {
    if (*x) {
      inputs.push_back(*std::move(*x));
    }
  }
  return outputs_of(std::make_shared<AttentionForward>(stream, config, with_lse), dtypes,
                    std::move(inputs));
}

}  // namespace mlx_anvil

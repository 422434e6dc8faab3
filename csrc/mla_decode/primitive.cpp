#include "mla_decode/primitive.h"

#include <utility>

#include "common/allocate.h"
#include "common/select.h"
#include "flash_attention/forward.h"
#include "flash_attention/operands.h"
#include "flash_attention/primitive.h"
#include "mla_decode/compose.h"
#include "mla_decode/cpu.h"
#include "mla_decode/gpu.h"

namespace mlx_anvil {

namespace {

// Inputs: q_nope, q_rope, latent, k_rope, then mask, sinks and sequences, without those that the
// call lacks.
class MlaDecode : public FusedPrimitive {
 public:
  MlaDecode(mx::Stream stream, const AttentionConfig& config, bool with_lse)
      : FusedPrimitive(stream), config_(config), with_lse_(with_lse) {}

  const char* op() const override { return kMlaDecode; }
  const char* kind() const override { return "MlaDecode"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& that = static_cast<const MlaDecode&>(other);
    return config_ == that.config_ && with_lse_ == that.with_lse_;
  }

  Arrays compose(const Arrays& inputs) override {
    Arrays outputs = compose_mla(config_, operands(inputs), stream());
    if (!with_lse_) {
      outputs.pop_back();
    }
    return outputs;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape rows = inputs[0].shape();
    std::vector<mx::Shape> shapes = {rows};
    if (with_lse_) {
      rows.pop_back();
      shapes.push_back(rows);
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const MlaInputs in = operands(inputs);
    allocate_outputs(in, outputs);
    MlaArgs args{};
    args.dtype = kernel_dtype_of(in.q_nope);
    args.config = config_;
    args.sizes = sizes_of(in);
    args.rope_dim = in.q_rope.shape(3);
    args.sizes.head_dim = 0;
    args.q = view_of(in.q_nope);
    args.q_rope = view_of(in.q_rope);
    args.k = args.v = view_of(in.latent);
    args.k_rope = view_of(in.k_rope);
    fill_mask_and_sinks(args, in.mask, in.sinks);
    fill_sequences(args, in.sequences);
    args.out = output_of(outputs[0]);
    args.lse = with_lse_ ? outputs[1].data<float>() : nullptr;
    args.lse_stride = args.sizes.q_len;
    run_on_cpu(
        *this, inputs, outputs, [args] { mla_decode_cpu(args); },
        [&] { return std::string("mla_decode_") + to_text(in.q_nope.dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    MlaInputs in = operands(inputs);
    MaskedAttention call =
        gpu_operands(config_, {in.q_nope, in.latent, in.latent, in.mask, in.sinks, in.sequences},
                     /*reads_sequences=*/false, stream());
    in.mask = std::move(call.in.mask);
    in.sinks = std::move(call.in.sinks);
    allocate_outputs(in, outputs);
    mla_decode_gpu(call.config, in, outputs[0], with_lse_ ? &outputs[1] : nullptr, stream());
  }

 protected:
  // The kernels read a dense table, and rows with any strides.
  bool wants_dense(size_t input) const override {
    return config_.is_ragged && input == sequences_at();
  }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override {
    const mx::array &q_nope = primals[0], &q_rope = primals[1];
    const int rank = q_nope.shape(3), both = rank + q_rope.shape(3);
    if (why_not_fused(both, rank, /*gradient=*/true, launches_kernels())) {
      return FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
    }
    const auto attention = [&](const Arrays& values) {
      return joined_attention(operands(substitute(primals, argnums, values)));
    };
    return mx::vjp(attention, select(primals, argnums), cotangents).second;
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const BatchFold batch(inputs, axes, stream());
    Arrays folded;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool is_table = config_.is_ragged && i == sequences_at();
      folded.push_back(is_table ? batch.fold_table(inputs[i], axes[i])
                                : batch.fold(inputs[i], axes[i], /*stretches=*/i >= kMaskAt));
    }
    Arrays outputs;
    for (const mx::array& x : apply_mla(config_, operands(folded), with_lse_, stream())) {
      outputs.push_back(batch.unfold(x));
    }
    return {outputs, std::vector<int>(outputs.size(), 0)};
  }

 private:
  static constexpr size_t kMaskAt = 4;

  size_t sinks_at() const { return kMaskAt + (config_.mask != AttentionMask::kNone); }
  size_t sequences_at() const { return sinks_at() + config_.has_sinks; }

  MlaInputs operands(const Arrays& inputs) const {
    MlaInputs in{inputs[0],    inputs[1],    inputs[2],   inputs[3],
                 std::nullopt, std::nullopt, std::nullopt};
    if (config_.mask != AttentionMask::kNone) {
      in.mask = inputs[kMaskAt];
    }
    if (config_.has_sinks) {
      in.sinks = inputs[sinks_at()];
    }
    if (config_.is_ragged) {
      in.sequences = inputs[sequences_at()];
    }
    return in;
  }

  // The same as attention over both parts side by side, whose gradients have kernels.
  Arrays joined_attention(const MlaInputs& in) {
    const auto both = [&](const mx::array& a, const mx::array& b) {
      return mx::concatenate({a, b}, -1, stream());
    };
    Arrays outputs = apply_attention(config_,
                                     {both(in.q_nope, in.q_rope), both(in.latent, in.k_rope),
                                      in.latent, in.mask, in.sinks, in.sequences},
                                     /*with_lse=*/true, stream());
    if (!with_lse_) {
      outputs.pop_back();
    }
    return outputs;
  }

  void allocate_outputs(const MlaInputs& in, Arrays& outputs) {
    allocate_like(outputs[0], in.q_nope, stream());
    if (with_lse_) {
      outputs[1].set_data(allocate(outputs[1].nbytes(), stream()));
    }
  }

  const AttentionConfig config_;
  const bool with_lse_;
};

}  // namespace

AttentionSizes sizes_of(const MlaInputs& in) {
  AttentionSizes sizes;
  sizes.batch = in.q_nope.shape(0);
  sizes.q_heads = in.q_nope.shape(1);
  sizes.kv_heads = 1;
  sizes.q_len = in.q_nope.shape(2);
  sizes.kv_len = in.latent.shape(2);
  sizes.head_dim = sizes.v_head_dim = in.latent.shape(3);
  return sizes;
}

Arrays apply_mla(const AttentionConfig& config, MlaInputs in, bool with_lse, mx::Stream stream) {
  std::vector<mx::Dtype> dtypes = {in.q_nope.dtype()};
  if (with_lse) {
    dtypes.push_back(mx::float32);
  }
  Arrays inputs;
  inputs.reserve(7);
  for (mx::array* x : {&in.q_nope, &in.q_rope, &in.latent, &in.k_rope}) {
    inputs.push_back(std::move(*x));
  }
  for (std::optional<mx::array>* x : {&in.mask, &in.sinks, &in.sequences}) {
    if (*x) {
      inputs.push_back(*std::move(*x));
    }
  }
  return outputs_of(std::make_shared<MlaDecode>(stream, config, with_lse), dtypes,
                    std::move(inputs));
}

}  // namespace mlx_anvil

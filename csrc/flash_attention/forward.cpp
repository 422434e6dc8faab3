#include "flash_attention/forward.h"

#include <algorithm>
#include <utility>

#include "common/allocate.h"
#include "flash_attention/compose.h"
#include "flash_attention/cpu.h"
#include "flash_attention/gradient.h"
#include "flash_attention/mlx_route.h"
#include "flash_attention/pages.h"
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
    const AttentionInputs given = operands(inputs);
    Arrays outputs;
    if (config_.is_paged) {
      const auto [config, in] = without_pages(config_, given, stream());
      outputs = apply_attention(config, in, /*with_lse=*/true, stream());
    } else {
      outputs = compose_attention(config_, given, stream());
    }
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
    const AttentionInputs in = operands(inputs);
    allocate_outputs(in, outputs);
    AttentionForwardArgs args{};
    fill_operands(args, config_, in);
    args.out = output_of(outputs[0]);
    args.lse = with_lse_ ? outputs[1].data<float>() : nullptr;
    args.lse_stride = args.sizes.q_len;
    dispatch_cpu(args.sizes.q_len <= kDecodeRows ? "decode" : "forward", inputs, outputs, args,
                 attention_forward_cpu);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (!with_lse_ && !config_.is_ragged && run_mlx(inputs, outputs[0])) {
      return;
    }
    const auto [config, in] =
        gpu_operands(config_, operands(inputs), /*reads_sequences=*/true, stream());
    allocate_outputs(in, outputs);
    const AttentionForwardArrays arrays{in, &outputs[0], with_lse_ ? &outputs[1] : nullptr};
    attention_forward_gpu(config, sizes_of(in), arrays, stream());
  }

 protected:
  bool composes_kernels() const override { return config_.is_paged; }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override;

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    if (config_.is_paged) {
      return FusedPrimitive::batched(inputs, axes);
    }
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

Arrays AttentionForward::gradient(const Arrays& primals,
                                  const Arrays& cotangents,
                                  const std::vector<int>& argnums,
                                  const Arrays& outputs) {
  if (config_.is_paged) {
    return FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
  }
  const AttentionInputs in = operands(primals);
  if (const char* why_not =
          why_not_fused(in.q.shape(3), in.v.shape(3), /*gradient=*/true, launches_kernels())) {
    note_fallback(op(), why_not);
    return FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
  }
  // Without a saved lse, nothing at the call indicated a gradient. The forward must run again.
  const Arrays saved = with_lse_ ? outputs : apply_attention(config_, in, true, stream());
  return attention_gradient(config_, primals, saved, cotangents, argnums, stream());
}

}  // namespace

const char* why_not_fused(int head_dim, int v_head_dim, bool gradient, bool on_gpu) {
  const int larger = std::max(head_dim, v_head_dim);
  if (!on_gpu) {
    return larger <= kMaxHeadDim ? nullptr : "the CPU has kernels for head dims up to 1024";
  }
  if (larger <= kMaxGpuHeadDim) {
    return nullptr;
  }
  if (gradient) {
    return "GPUs have kernels of the gradient for head dims up to 256";
  }
  return head_dim <= kMaxGpuKeyDim && v_head_dim <= kMaxGpuValueDim
             ? nullptr
             : "GPUs have kernels for head dims up to 576, and up to 512 of v";
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
  inputs.reserve(7);
  for (mx::array* x : {&in.q, &in.k, &in.v}) {
    inputs.push_back(std::move(*x));
  }
  for (std::optional<mx::array>* x : {&in.mask, &in.sinks, &in.sequences, &in.pages}) {
    if (*x) {
      inputs.push_back(*std::move(*x));
    }
  }
  return outputs_of(std::make_shared<AttentionForward>(stream, config, with_lse), dtypes,
                    std::move(inputs));
}

}  // namespace mlx_anvil

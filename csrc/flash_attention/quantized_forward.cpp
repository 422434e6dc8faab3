#include "flash_attention/quantized_forward.h"

#include <algorithm>
#include <utility>

#include "common/allocate.h"
#include "common/errors.h"
#include "common/shapeless.h"
#include "common/trace.h"
#include "flash_attention/compose.h"
#include "flash_attention/cpu.h"
#include "flash_attention/forward.h"
#include "flash_attention/gradient.h"
#include "flash_attention/pages.h"
#include "flash_attention/primitive.h"
#include "flash_attention/quantized_gpu.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

// Where the arrays of a call are among the inputs: q, k, v, mask, sinks, sequences, pages.
// Quantized matrices are w, scales and, if affine, biases.
struct InputOrder {
  InputOrder(const AttentionConfig& config, const QuantizedKvFormats& formats)
      : v(k + 2 + formats.k.has_biases()),
        mask(v + 2 + formats.v.has_biases()),
        sinks(mask + (config.mask != AttentionMask::kNone)),
        sequences(sinks + config.has_sinks),
        pages(sequences + config.is_ragged) {}

  // The argument of attention on plain arrays that input `i` belongs to.
  size_t argument_of(size_t i) const {
    return i == 0 ? 0 : i < v ? 1 : i < mask ? 2 : 3 + i - mask;
  }

  const size_t k = 1;
  const size_t v, mask, sinks, sequences, pages;
};

// Differentiable in scales and biases, to any order.
mx::array dequantized(const QuantizedFormat& format,
                      const QuantizedMatrix& matrix,
                      mx::Dtype dtype,
                      mx::Stream s) {
  return mx::astype(compose_dequantized(format, matrix, s), dtype, s);
}

QuantizedView view_of(const QuantizedFormat& format, const QuantizedMatrix& matrix) {
  QuantizedView view;
  view.format = format;
  view.data = {matrix.w.data<uint32_t>(), matrix.scales.data<void>(),
               matrix.biases ? matrix.biases->data<void>() : nullptr};
  const auto copy = [](const mx::array& x, int64_t* to) {
    std::copy_n(x.strides().begin(), 3, to);
  };
  copy(matrix.w, view.w_strides);
  copy(matrix.scales, view.scales_strides);
  if (matrix.biases) {
    copy(*matrix.biases, view.biases_strides);
  }
  return view;
}

class QuantizedAttention : public FusedPrimitive {
 public:
  QuantizedAttention(mx::Stream stream,
                     const AttentionConfig& config,
                     const QuantizedKvFormats& formats,
                     bool with_lse)
      : FusedPrimitive(stream),
        config_(config),
        formats_(formats),
        with_lse_(with_lse),
        order_(config, formats) {}

  const char* op() const override { return kFlashAttention; }
  const char* kind() const override { return "QuantizedFlashAttention"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& that = static_cast<const QuantizedAttention&>(other);
    return config_ == that.config_ && formats_ == that.formats_ && with_lse_ == that.with_lse_;
  }

  Arrays compose(const Arrays& inputs) override {
    const QuantizedAttentionInputs in = operands(inputs);
    Arrays outputs;
    if (config_.is_paged) {
      AttentionConfig config = config_;
      config.is_paged = false;
      outputs = apply_quantized_attention(config, formats_, without_pages(in, stream()),
                                          /*with_lse=*/true, stream());
    } else {
      outputs = compose_attention(config_, dequantized_inputs(formats_, in, stream()), stream());
    }
    if (!with_lse_) {
      outputs.pop_back();
    }
    return outputs;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape& q = inputs[0].shape();
    const int v_head_dim = inputs[order_.v + 1].shape(3) * formats_.v.group;
    std::vector<mx::Shape> shapes = {{q[0], q[1], q[2], v_head_dim}};
    if (with_lse_) {
      shapes.push_back({q[0], q[1], q[2]});
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const QuantizedAttentionInputs in = operands(inputs);
    allocate_like(outputs[0], in.q, stream());
    if (with_lse_) {
      outputs[1].set_data(allocate(outputs[1].nbytes(), stream()));
    }
    QuantizedAttentionArgs args{};
    args.dtype = kernel_dtype_of(in.q);
    args.config = config_;
    args.sizes = sizes(inputs);
    args.q = mlx_anvil::view_of(in.q);
    args.keys = view_of(formats_.k, in.k);
    args.values = view_of(formats_.v, in.v);
    fill_mask_and_sinks(args, in.mask, in.sinks);
    fill_sequences(args, in.sequences);
    fill_pages(args, in.pages, in.k.w);
    args.out = output_of(outputs[0]);
    args.lse = with_lse_ ? outputs[1].data<float>() : nullptr;
    args.lse_stride = args.sizes.q_len;
    run_on_cpu(
        *this, inputs, outputs, [args] { quantized_attention_forward_cpu(args); },
        [&] { return kernel_text(args.sizes, in.q.dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    QuantizedAttentionInputs in = operands(inputs);
    const AttentionSizes all = sizes(inputs);
    // A packed batch goes to the kernels for many queries, which take heads up to this.
    const bool reads_sequences =
        !config_.is_packed || std::max(all.head_dim, all.v_head_dim) <= kMaxGpuHeadDim;
    MaskedAttention call =
        gpu_operands(config_, {in.q, in.k.w, in.v.w, in.mask, in.sinks, in.sequences, in.pages},
                     reads_sequences, stream());
    in.mask = std::move(call.in.mask);
    in.sinks = std::move(call.in.sinks);
    in.sequences = std::move(call.in.sequences);
    allocate_like(outputs[0], in.q, stream());
    if (with_lse_) {
      outputs[1].set_data(allocate(outputs[1].nbytes(), stream()));
    }
    quantized_attention_forward_gpu(call.config, formats_, all,
                                    {in, &outputs[0], with_lse_ ? &outputs[1] : nullptr}, stream());
  }

 protected:
  bool composes_kernels() const override { return config_.is_paged; }

  // Keys and values are slices of a cache. The kernels take any strides but that of a row's codes.
  // The tables are dense.
  bool wants_dense(size_t input) const override {
    return is_of_cache(input) || input >= order_.sequences;
  }
  bool takes(size_t input, const mx::array& x) const override {
    return is_of_cache(input) && (x.strides().back() == 1 || x.shape(-1) == 1);
  }
  bool copies_primal(size_t) const override { return false; }

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
    Arrays folded;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool is_table = config_.is_ragged && i == order_.sequences;
      folded.push_back(is_table ? batch.fold_table(inputs[i], axes[i])
                                : batch.fold(inputs[i], axes[i], /*stretches=*/i >= order_.mask));
    }
    Arrays outputs;
    for (const mx::array& x :
         apply_quantized_attention(config_, formats_, operands(folded), with_lse_, stream())) {
      outputs.push_back(batch.unfold(x));
    }
    return {outputs, std::vector<int>(outputs.size(), 0)};
  }

 private:
  bool is_of_cache(size_t input) const { return order_.k <= input && input < order_.mask; }

  QuantizedAttentionInputs operands(const Arrays& inputs) const {
    QuantizedAttentionInputs in{inputs[0],
                                matrix_at(formats_.k, inputs, order_.k),
                                matrix_at(formats_.v, inputs, order_.v),
                                std::nullopt,
                                std::nullopt,
                                std::nullopt,
                                std::nullopt};
    if (config_.mask != AttentionMask::kNone) {
      in.mask = inputs[order_.mask];
    }
    if (config_.has_sinks) {
      in.sinks = inputs[order_.sinks];
    }
    if (config_.is_ragged) {
      in.sequences = inputs[order_.sequences];
    }
    if (config_.is_paged) {
      in.pages = inputs[order_.pages];
    }
    return in;
  }

  AttentionSizes sizes(const Arrays& inputs) const {
    const mx::array &q = inputs[0], &k = inputs[order_.k];
    AttentionSizes sizes;
    sizes.batch = q.shape(0);
    sizes.q_heads = q.shape(1);
    sizes.kv_heads = k.shape(1);
    sizes.q_len = q.shape(2);
    sizes.kv_len = config_.is_paged ? int64_t{inputs[order_.pages].shape(1)} * k.shape(2)
                                    : int64_t{k.shape(2)};
    sizes.head_dim = q.shape(3);
    sizes.v_head_dim = int64_t{inputs[order_.v + 1].shape(3)} * formats_.v.group;
    return sizes;
  }

  void require_differentiable(size_t input) const {
    if (input < order_.k || input >= order_.mask) {
      return;
    }
    const bool of_k = input < order_.v;
    const std::string name = of_k ? "k" : "v";
    const QuantizedFormat& format = of_k ? formats_.k : formats_.v;
    if (input == (of_k ? order_.k : order_.v)) {
      throw_value_error(op(), "no gradient in the codes of " + name +
                                  ", which are integers; allowed: q, mask, sinks" +
                                  (format.has_biases() ? ", scales, biases." : "."));
    }
    if (!format.has_biases()) {
      throw_value_error(op(), "no gradient in scales of " + name + " in mode '" +
                                  mode_name(format.kind) +
                                  "', which are 8-bit codes; allowed: q, mask, sinks.");
    }
  }

  // The gradients of scales and biases.
  Arrays through_dequantization(const QuantizedFormat& format,
                                const QuantizedMatrix& matrix,
                                const mx::array& gradient) {
    const auto function = [&](const Arrays& numbers) -> Arrays {
      return {dequantized(format, {matrix.w, numbers[0], numbers[1]}, gradient.dtype(), stream())};
    };
    return mx::vjp(function, {matrix.scales, *matrix.biases}, {gradient}).second;
  }

  // "decode_bfloat16_d128_affine4_g64_affine4_g64"
  std::string kernel_text(const AttentionSizes& sizes, mx::Dtype dtype) const {
    std::string text = sizes.q_len <= kDecodeRows ? "quantized_decode_" : "quantized_forward_";
    text = std::string(op()) + "_" + text + to_text(dtype) + "_d" + std::to_string(sizes.head_dim);
    for (const QuantizedFormat& format : {formats_.k, formats_.v}) {
      text += std::string("_") + mode_name(format.kind) + std::to_string(format.bits) + "_g" +
              std::to_string(format.group);
    }
    return text;
  }

  const AttentionConfig config_;
  const QuantizedKvFormats formats_;
  const bool with_lse_;
  const InputOrder order_;
};

Arrays QuantizedAttention::gradient(const Arrays& primals,
                                    const Arrays& cotangents,
                                    const std::vector<int>& argnums,
                                    const Arrays& outputs) {
  for (int i : argnums) {
    require_differentiable(i);
  }
  if (config_.is_paged) {
    return FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
  }
  std::vector<int> arguments;  // of attention on plain arrays, each once
  for (int i : argnums) {
    const int argument = static_cast<int>(order_.argument_of(i));
    if (std::find(arguments.begin(), arguments.end(), argument) == arguments.end()) {
      arguments.push_back(argument);
    }
  }
  const QuantizedAttentionInputs in = operands(primals);
  const mx::Stream s = stream();
  // In float32, as the forward reads keys and values. Gradients of scales also sum products with
  // codes of up to 255, which would magnify rounding to 16 bits.
  const auto wide = [&](const mx::array& x) { return mx::astype(x, mx::float32, s); };
  AttentionInputs plain = {wide(in.q),
                           compose_dequantized(formats_.k, in.k, s),
                           compose_dequantized(formats_.v, in.v, s),
                           in.mask,
                           in.sinks,
                           in.sequences,
                           std::nullopt};
  if (const char* why_not = why_not_fused(plain.q.shape(3), plain.v.shape(3), /*gradient=*/true,
                                          launches_kernels())) {
    note_fallback(op(), why_not);
    return FusedPrimitive::gradient(primals, cotangents, argnums, outputs);
  }
  if (config_.mask == AttentionMask::kAdditive) {
    plain.mask = wide(*plain.mask);
  }
  const Arrays saved = apply_attention(config_, plain, true, s);
  Arrays plain_cotangents = cotangents;
  plain_cotangents[0] = wide(plain_cotangents[0]);
  Arrays plain_primals = {plain.q, plain.k, plain.v};
  OptionalInputs::append(plain_primals, plain.mask);
  OptionalInputs::append(plain_primals, plain.sinks);
  OptionalInputs::append(plain_primals, plain.sequences);
  const Arrays gradients =
      attention_gradient(config_, plain_primals, saved, plain_cotangents, arguments, s);
  const auto of_argument = [&](size_t argument) {
    const auto at = std::find(arguments.begin(), arguments.end(), static_cast<int>(argument));
    return gradients[at - arguments.begin()];
  };
  Arrays of_k, of_v, selected;
  for (int i : argnums) {
    const auto at = static_cast<size_t>(i);
    if (at < order_.k || at >= order_.mask) {
      selected.push_back(mx::astype(of_argument(order_.argument_of(at)), primals[at].dtype(), s));
      continue;
    }
    const bool in_k = at < order_.v;
    Arrays& of_numbers = in_k ? of_k : of_v;
    if (of_numbers.empty()) {
      of_numbers = in_k ? through_dequantization(formats_.k, in.k, of_argument(1))
                        : through_dequantization(formats_.v, in.v, of_argument(2));
    }
    selected.push_back(of_numbers[at - (in_k ? order_.k : order_.v) - 1]);
  }
  return selected;
}

}  // namespace

Arrays apply_quantized_attention(const AttentionConfig& config,
                                 const QuantizedKvFormats& formats,
                                 QuantizedAttentionInputs in,
                                 bool with_lse,
                                 mx::Stream stream) {
  std::vector<mx::Dtype> dtypes = {in.q.dtype()};
  if (with_lse) {
    dtypes.push_back(mx::float32);
  }
  Arrays inputs = {std::move(in.q)};
  for (QuantizedMatrix* matrix : {&in.k, &in.v}) {
    inputs.push_back(std::move(matrix->w));
    inputs.push_back(std::move(matrix->scales));
    if (matrix->biases) {
      inputs.push_back(*std::move(matrix->biases));
    }
  }
  for (std::optional<mx::array>* x : {&in.mask, &in.sinks, &in.sequences, &in.pages}) {
    if (*x) {
      inputs.push_back(*std::move(*x));
    }
  }
  return outputs_of(std::make_shared<QuantizedAttention>(stream, config, formats, with_lse), dtypes,
                    std::move(inputs));
}

AttentionInputs dequantized_inputs(const QuantizedKvFormats& formats,
                                   const QuantizedAttentionInputs& in,
                                   mx::Stream stream) {
  return {in.q,
          dequantized(formats.k, in.k, in.q.dtype(), stream),
          dequantized(formats.v, in.v, in.q.dtype(), stream),
          in.mask,
          in.sinks,
          in.sequences,
          std::nullopt};
}

}  // namespace mlx_anvil

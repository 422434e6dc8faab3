#include "quantized_embedding/scale_gradient.h"

#include <utility>

#include "common/allocate.h"
#include "gather_matmul/sum_pairs.h"
#include "quantized_embedding/cpu.h"
#include "quantized_embedding/primitive.h"
#include "quantized_embedding/quantized_embedding.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

// Inputs: dy, ids, w. Outputs: d_scales, d_biases.
class EmbeddingScaleGradient : public QuantizedPrimitive {
 public:
  EmbeddingScaleGradient(mx::Stream stream, const QuantizedFormat& format)
      : QuantizedPrimitive(stream, kQuantizedEmbedding, format) {}

  const char* kind() const override { return "EmbeddingScaleGradient"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           format_ == static_cast<const EmbeddingScaleGradient&>(other).format_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::array ids = mx::astype(mx::flatten(inputs[1], s), mx::int32, s);
    const mx::array dy = mx::reshape(mx::astype(inputs[0], mx::float32, s),
                                     {static_cast<int>(ids.size()), inputs[0].shape(-1)}, s);
    const auto by_row = [&](const mx::array& terms) {
      return mx::astype(apply_sum_pairs(terms, ids, inputs[2].shape(0), s), inputs[0].dtype(), s);
    };
    const mx::array codes = mx::take(inputs[2], ids, 0, s);
    return {by_row(compose_scale_gradient(format_, dy, codes, s)),
            by_row(compose_bias_gradient(format_, dy, s))};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape shape = {inputs[2].shape(0), inputs[0].shape(-1) / format_.group};
    return {shape, shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    EmbeddingScaleGradientArgs args{};
    args.ids = row_ids(inputs[1]);
    args.dtype = kernel_dtype_of(inputs[0]);
    args.format = format_;
    args.columns = inputs[0].shape(-1);
    args.rows = inputs[2].shape(0);
    args.w = inputs[2].data<uint32_t>();
    args.dy = inputs[0].data<void>();
    args.d_scales = outputs[0].data<void>();
    args.d_biases = outputs[1].data<void>();
    dispatch_cpu("embedding_scale_gradient", inputs, outputs, args, embedding_scale_gradient_cpu);
  }

  void eval_gpu_kernels(const Arrays&, Arrays&) override {
    throw_internal_error(op_, "a node for the CPU was evaluated elsewhere.");
  }

 protected:
  // With the cotangents as scales and biases, and the same codes, the gradient is a lookup.
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    Arrays gradients;
    for (int i : argnums) {
      require_dy(i);
      gradients.push_back(apply_quantized_embedding(format_, primals[1],
                                                    {primals[2], cotangents[0], cotangents[1]},
                                                    primals[0].dtype(), stream()));
    }
    return gradients;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    for (int i : argnums) {
      require_dy(i);
    }
    return apply_embedding_scale_gradient(format_, tangents[0], primals[1], primals[2], stream());
  }

 private:
  void require_dy(int argument) const {
    if (argument > 0) {
      throw_value_error(op_, std::string("no gradient in ") + (argument == 1 ? "ids" : "w") +
                                 ", which holds integers; allowed: scales and biases of mode "
                                 "'affine'.");
    }
  }
};

}  // namespace

Arrays apply_embedding_scale_gradient(
    const QuantizedFormat& format, mx::array dy, mx::array ids, mx::array w, mx::Stream s) {
  auto primitive = std::make_shared<EmbeddingScaleGradient>(s, format);
  if (primitive->launches_kernels()) {
    note_fallback(kQuantizedEmbedding, "the gradient of QuantizedEmbedding is a graph of MLX ops");
    return primitive->compose({dy, ids, w});
  }
  const mx::Dtype dtype = dy.dtype();
  return outputs_of(std::move(primitive), {dtype, dtype},
                    {std::move(dy), std::move(ids), std::move(w)});
}

}  // namespace mlx_anvil

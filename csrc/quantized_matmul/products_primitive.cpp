// Products of one x with several matrices, as one node: x is packed once, and the threads share the
// rows of all matrices. x may have any shape whose elements, in their order, are the rows.
#include "common/allocate.h"
#include "common/errors.h"
#include "common/pending.h"
#include "quantized_matmul/cpu.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

constexpr const char* kOp = "quantized_matmul";

class QuantizedProducts : public QuantizedPrimitive {
 public:
  // `rows` are the axes of the results but the last; none: those of x.
  QuantizedProducts(mx::Stream stream, const QuantizedFormat& format, std::optional<mx::Shape> rows)
      : QuantizedPrimitive(stream, kOp, format), rows_(std::move(rows)) {}

  const char* kind() const override { return "QuantizedProducts"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& same = static_cast<const QuantizedProducts&>(other);
    return format_ == same.format_ && rows_ == same.rows_;
  }

  // Derivatives and vmap are those of the single products.
  Arrays compose(const Arrays& inputs) override {
    const mx::array x =
        rows_ ? mx::reshape(inputs[0], shape_with(inputs, columns(inputs)), stream()) : inputs[0];
    Arrays outputs;
    for (size_t i = 0; i < count(inputs); ++i) {
      outputs.push_back(apply_quantized_matmul(op_, format_, QuantizedProduct::kTransposed, x,
                                               matrix_at(format_, inputs, first(i)), stream()));
    }
    return outputs;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < count(inputs); ++i) {
      shapes.push_back(shape_with(inputs, inputs[first(i)].shape(-2)));
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const auto size = static_cast<int64_t>(inputs[0].size());
    QuantizedProductsArgs args{kernel_dtype_of(inputs[0]), format_,
                               size / columns(inputs),     columns(inputs),
                               inputs[0].data<void>(),     {}};
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].set_data(allocate(outputs[i].nbytes(), stream()));
      args.products.push_back({pointers_of(weights_at(format_, inputs, first(i))),
                               outputs[i].shape(-1), outputs[i].data<void>()});
    }
    const std::string several = outputs.size() > 1 ? "_x" + std::to_string(outputs.size()) : "";
    dispatch_cpu("quantized_gemv" + several, inputs, outputs, args, quantized_products_cpu);
  }

  void eval_gpu_kernels(const Arrays&, Arrays&) override {
    throw_internal_error(op_, "a node for the CPU was evaluated elsewhere.");
  }

 protected:
  bool composes_kernels() const override { return true; }

 private:
  size_t count(const Arrays& inputs) const { return (inputs.size() - 1) / arrays_per_matrix(); }
  size_t first(size_t matrix) const { return 1 + matrix * arrays_per_matrix(); }
  int columns(const Arrays& inputs) const { return 32 * inputs[1].shape(-1) / format_.bits; }

  mx::Shape shape_with(const Arrays& inputs, int last) const {
    mx::Shape shape = rows_ ? *rows_ : inputs[0].shape();
    if (rows_) {
      shape.push_back(last);
    } else {
      shape.back() = last;
    }
    return shape;
  }

  const std::optional<mx::Shape> rows_;
};

}  // namespace

Arrays apply_quantized_products(const QuantizedFormat& format,
                                const mx::array& x,
                                std::vector<QuantizedMatrix> matrices,
                                mx::Stream s) {
  const QuantizedSizes sizes = quantized_sizes(format, x, matrices[0].w);
  if (for_gpu(s) || sizes.rows > kQuantizedGemvRows || sizes.columns == 0) {
    Arrays outputs;
    for (QuantizedMatrix& matrix : matrices) {
      outputs.push_back(apply_quantized_matmul(kOp, format, QuantizedProduct::kTransposed, x,
                                               std::move(matrix), s));
    }
    return outputs;
  }
  const std::vector<mx::Dtype> dtypes(matrices.size(), x.dtype());
  Arrays inputs;
  inputs.reserve(1 + 3 * matrices.size());
  std::optional<mx::Shape> rows;
  if (is_pending(x, "Reshape") && !x.is_tracer() && x.primitive().stream() == s) {
    rows = mx::Shape(x.shape().begin(), x.shape().end() - 1);
  }
  inputs.push_back(rows ? x.inputs()[0] : x);
  for (QuantizedMatrix& matrix : matrices) {
    append(inputs, std::move(matrix));
  }
  return outputs_of(std::make_shared<QuantizedProducts>(s, format, std::move(rows)), dtypes,
                    std::move(inputs));
}

}  // namespace mlx_anvil

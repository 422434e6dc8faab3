// Products of one x with several matrices, as one node: x is packed once, and the threads share the
// rows of all matrices.
#include <stdexcept>

#include "common/allocate.h"
#include "quantized_matmul/cpu.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

constexpr const char* kOp = "quantized_matmul";

class QuantizedProducts : public QuantizedPrimitive {
 public:
  QuantizedProducts(mx::Stream stream, const QuantizedFormat& format)
      : QuantizedPrimitive(stream, kOp, format) {}

  const char* kind() const override { return "QuantizedProducts"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           format_ == static_cast<const QuantizedProducts&>(other).format_;
  }

  // Derivatives and vmap are those of the single products.
  Arrays compose(const Arrays& inputs) override {
    Arrays outputs;
    for (size_t i = 0; i < count(inputs); ++i) {
      outputs.push_back(apply_quantized_matmul(op_, format_, QuantizedProduct::kTransposed,
                                               inputs[0], matrix_at(format_, inputs, first(i)),
                                               stream()));
    }
    return outputs;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < count(inputs); ++i) {
      shapes.push_back(inputs[0].shape());
      shapes.back().back() = inputs[first(i)].shape(-2);
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const QuantizedSizes sizes = quantized_sizes(format_, inputs[0], inputs[1]);
    QuantizedProductsArgs args{kernel_dtype_of(inputs[0]), format_, sizes.rows, sizes.columns,
                               inputs[0].data<void>(),     {}};
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].set_data(allocate(outputs[i].nbytes(), stream()));
      args.products.push_back({pointers_of(weights_at(format_, inputs, first(i))),
                               outputs[i].shape(-1), outputs[i].data<void>()});
    }
    const std::string variant = "quantized_gemv_x" + std::to_string(outputs.size());
    dispatch_cpu(variant, inputs, outputs, args, quantized_products_cpu);
  }

  void eval_gpu_kernels(const Arrays&, Arrays&) override {
    throw std::logic_error("[quantized_matmul] several products on a GPU are several nodes.");
  }

 protected:
  bool composes_kernels() const override { return true; }

 private:
  size_t count(const Arrays& inputs) const { return (inputs.size() - 1) / arrays_per_matrix(); }
  size_t first(size_t matrix) const { return 1 + matrix * arrays_per_matrix(); }
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
  inputs.push_back(x);
  for (QuantizedMatrix& matrix : matrices) {
    append(inputs, std::move(matrix));
  }
  return outputs_of(std::make_shared<QuantizedProducts>(s, format), dtypes, std::move(inputs));
}

}  // namespace mlx_anvil

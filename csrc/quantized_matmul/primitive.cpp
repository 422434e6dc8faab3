#include "quantized_matmul/primitive.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>

#include "common/allocate.h"
#include "common/checks.h"
#include "quantized_matmul/cpu.h"
#include "quantized_matmul/mlx_route.h"
#include "quantized_matmul/quantized_primitive.h"
#include "quantized_matmul/scale_gradient.h"

namespace mlx_anvil {

namespace {

class QuantizedMatmul : public QuantizedPrimitive {
 public:
  QuantizedMatmul(mx::Stream stream,
                  const char* op,
                  const QuantizedFormat& format,
                  QuantizedProduct product)
      : QuantizedPrimitive(stream, op, format), product_(product) {}

  const char* kind() const override { return "QuantizedMatmul"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& o = static_cast<const QuantizedMatmul&>(other);
    return format_ == o.format_ && product_ == o.product_ && is_gemv() == o.is_gemv();
  }

  Arrays compose(const Arrays& inputs) override {
    return {compose_quantized_matmul(format_, product_, inputs[0], matrix(inputs), stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = product_ == QuantizedProduct::kTransposed ? inputs[1].shape(-2)
                                                             : inputs[2].shape(-1) * format_.group;
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    QuantizedMatmulArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.format = format_;
    args.product = product_;
    args.sizes = quantized_sizes(format_, inputs[0], inputs[1]);
    args.weights = pointers_of(weights_at(format_, inputs, 1));
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    const bool few = args.sizes.rows <= kQuantizedGemvRows;
    const bool transposed = product_ == QuantizedProduct::kTransposed;
    dispatch_cpu(!transposed ? "quantized_matmul_plain"
                 : few       ? "quantized_gemv"
                             : "quantized_matmul_transposed",
                 inputs, outputs, args, quantized_matmul_cpu);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (outputs[0].size() == 0) {
      outputs[0].set_data(allocate(0, stream()));
      return;
    }
    const QuantizedSizes sizes = quantized_sizes(format_, inputs[0], inputs[1]);
    if (inputs[0].size() == 0) {  // sums without terms
      set_zeros(outputs[0], stream());
      return;
    }
    const bool is_few_of_gemv = is_gemv() && sizes.rows <= kQuantizedGemvRows;
    const auto kernel = is_few_of_gemv
                            ? std::nullopt
                            : faster_mlx_product(format_, sizes, product_, inputs[0], stream());
    if (kernel) {
      const auto graph = [this](const Arrays& in) {
        return mlx_quantized_matmul(format_, product_, in[0], matrix(in), stream());
      };
      run_mlx_kernel(op_, *kernel, graph, inputs, outputs[0], stream());
      return;
    }
    const QuantizedWeightArrays weights = weights_at(format_, inputs, 1);
    if (is_few_of_gemv) {
      outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
      quantized_gemv_gpu(format_, sizes, inputs[0], weights, outputs[0], stream());
    } else {
      quantized_matmul_gpu(format_, sizes, product_, inputs[0], weights, outputs[0], stream());
    }
  }

 protected:
  // The gradient in x is the other product with the same w. Those in scales and biases share a
  // node: in the gradient of that, their terms add up before a product with x, which could overflow
  // for each alone.
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override {
    std::vector<int> of_weights;
    for (int i : argnums) {
      if (i > 0) {
        require_differentiable(i, 1);
        of_weights.push_back(i);
      }
    }
    Arrays of_matrix;
    if (!of_weights.empty()) {
      of_matrix = launches_kernels()
                      ? FusedPrimitive::gradient(primals, cotangents, of_weights, outputs)
                      : weight_gradients(primals, cotangents[0], of_weights);
    }
    Arrays gradients;
    auto next = of_matrix.begin();
    for (int i : argnums) {
      gradients.push_back(i > 0 ? *next++
                                : apply_quantized_matmul(op_, format_.exact(), other(product_),
                                                         cotangents[0], matrix(primals), stream()));
    }
    return gradients;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    return {*product_tangent(
        primals, tangents, argnums, [&](const mx::array& x, const QuantizedMatrix& weights) {
          return apply_quantized_matmul(op_, format_.exact(), product_, x, weights, stream());
        })};
  }

  // The vmap axis adds rows if w is shared; otherwise it becomes a batch axis.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    const bool own_weights =
        std::any_of(axes.begin() + 1, axes.end(), [](int axis) { return axis >= 0; });
    const size_t w_rank = inputs[1].ndim() - (axes[1] >= 0);
    if (!own_weights && w_rank == 2) {
      return {{apply_quantized_matmul(op_, format_, product_,
                                      mx::moveaxis(inputs[0], axes[0], 0, s), matrix(inputs), s)},
              {0}};
    }
    Arrays front = with_vmap_in_front(inputs, axes, s);
    mx::Shape shape = front[0].shape();
    if (w_rank == 2) {
      const int rows = std::accumulate(shape.begin() + 1, shape.end() - 1, 1, std::multiplies<>());
      front[0] = mx::reshape(front[0], {shape[0], rows, shape.back()}, s);
    }
    const mx::array out =
        apply_quantized_matmul(op_, format_, product_, front[0], matrix(front), s);
    shape.back() = out.shape(-1);
    return {{mx::reshape(out, shape, s)}, {0}};
  }

 private:
  // Rows of quantized_gemv have the same bits however many they are; other products of 3 to 8 rows
  // may take another kernel.
  bool is_gemv() const {
    return product_ == QuantizedProduct::kTransposed && std::string_view(op_) == "quantized_gemv";
  }

  QuantizedMatrix matrix(const Arrays& inputs) const { return matrix_at(format_, inputs, 1); }

  Arrays weight_gradients(const Arrays& primals,
                          const mx::array& cotangent,
                          const std::vector<int>& argnums) {
    const bool transposed = product_ == QuantizedProduct::kTransposed;
    const bool has_scales = std::find(argnums.begin(), argnums.end(), 2) != argnums.end();
    const mx::array& x = primals[0];
    const Arrays both =
        apply_scale_gradient(op_, format_, transposed ? cotangent : x, transposed ? x : cotangent,
                             primals[1], has_scales, stream());
    Arrays gradients;
    for (int i : argnums) {
      gradients.push_back(
          mx::astype(i == 2 ? both.front() : both.back(), primals[i].dtype(), stream()));
    }
    return gradients;
  }

  const QuantizedProduct product_;
};

}  // namespace

QuantizedSizes sizes_with_columns(int64_t columns, const mx::array& x, const mx::array& w) {
  QuantizedSizes sizes;
  sizes.columns = columns;
  sizes.outputs = w.shape(-2);
  for (int i = 0; i + 2 < static_cast<int>(w.ndim()); ++i) {
    sizes.batch *= w.shape(i);
  }
  sizes.rows = 1;
  const int first_row_axis = w.ndim() == 2 ? 0 : static_cast<int>(x.ndim()) - 2;
  for (int i = std::max(0, first_row_axis); i + 1 < static_cast<int>(x.ndim()); ++i) {
    sizes.rows *= x.shape(i);
  }
  return sizes;
}

QuantizedSizes quantized_sizes(const QuantizedFormat& format,
                               const mx::array& x,
                               const mx::array& w) {
  return sizes_with_columns(int64_t{32} * w.shape(-1) / format.bits, x, w);
}

namespace {

// True if MLX on CUDA has a tensor-core kernel for the call, ours does not suit it, and the rows
// are too many for the kernels that read w again for every 8 rows, but too few for dequantising w
// to pay off. Derivatives and vmap use ours.
bool is_for_tensor_cores(const QuantizedFormat& format,
                         const QuantizedSizes& sizes,
                         QuantizedProduct product,
                         const mx::array& x,
                         const QuantizedMatrix& matrix,
                         mx::Stream s) {
  constexpr int64_t kMostRows = 96, kOutputTile = 128;
  const int64_t depth_tile = std::max(64, format.group);
  const bool by_matrix_units =
      format.has_biases() && format.bits == 4 && sizes.columns % kMatrixColumns == 0;
  if (suits_quantized_gemm(format, sizes, product, x.dtype(), s.device)) {
    return false;
  }
  if (sizes.rows <= (by_matrix_units ? kMostMatrixRows : kQuantizedGemvRows) ||
      sizes.rows > kMostRows) {
    return false;
  }
  const bool traced =
      x.is_tracer() || matrix.scales.is_tracer() || (matrix.biases && matrix.biases->is_tracer());
  return !traced && x.dtype() != mx::float32 && (format.bits == 4 || format.bits == 8) &&
         product == QuantizedProduct::kTransposed && sizes.outputs > 0 && sizes.columns > 0 &&
         sizes.outputs % kOutputTile == 0 && sizes.columns % depth_tile == 0 &&
         launches_on_cuda(s.device);
}

}  // namespace

mx::array apply_quantized_matmul(const char* op,
                                 const QuantizedFormat& format,
                                 QuantizedProduct product,
                                 mx::array x,
                                 QuantizedMatrix matrix,
                                 mx::Stream s) {
  if (for_gpu(s)) {
    const QuantizedSizes sizes = quantized_sizes(format, x, matrix.w);
    if (is_for_tensor_cores(format, sizes, product, x, matrix, s)) {
      note_mlx_kernel(op, "mx.quantized_matmul",
                      "MLX's tensor core kernel is faster for up to 96 rows");
      return mlx_quantized_matmul(format, product, x, matrix, s);
    }
    std::string why_not;
    if (!can_launch_quantized(sizes, s, &why_not)) {
      note_fallback(op, why_not);
      return mlx_quantized_matmul(format, product, x, matrix, s);
    }
  }
  const mx::Dtype dtype = x.dtype();
  return output_of(std::make_shared<QuantizedMatmul>(s, op, format, product), dtype,
                   inputs_with(std::move(x), std::move(matrix)));
}

}  // namespace mlx_anvil

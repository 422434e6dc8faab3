#include "quantized_matmul/scale_gradient.h"

#include <functional>
#include <numeric>
#include <utility>

#include "common/allocate.h"
#include "common/mlx_ops.h"
#include "quantized_matmul/cpu.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

// Inputs: y, x, w. Outputs: d_scales if wanted, d_biases. For GPU streams and simulate(), the
// gradient is a graph.
class QuantizedScaleGradient : public QuantizedPrimitive {
 public:
  QuantizedScaleGradient(mx::Stream stream,
                         const char* op,
                         const QuantizedFormat& format,
                         bool has_scales)
      : QuantizedPrimitive(stream, op, format), has_scales_(has_scales) {}

  const char* kind() const override { return "QuantizedScaleGradient"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& o = static_cast<const QuantizedScaleGradient&>(other);
    return format_ == o.format_ && has_scales_ == o.has_scales_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const bool is_shared = inputs[2].ndim() == 2;
    const auto rows = [&](const mx::array& x) {
      const mx::array wide = mx::astype(x, mx::float32, s);
      return is_shared ? mx::reshape(wide, {rows_of(x), x.shape(-1)}, s) : wide;
    };
    const mx::array of_weights =
        matrix_product(mx::swapaxes(rows(inputs[0]), -1, -2, s), rows(inputs[1]), s);
    Arrays gradients;
    if (has_scales_) {
      gradients.push_back(compose_scale_gradient(format_, of_weights, inputs[2], s));
    }
    gradients.push_back(compose_bias_gradient(format_, of_weights, s));
    for (mx::array& gradient : gradients) {
      gradient = mx::astype(gradient, inputs[0].dtype(), s);
    }
    return gradients;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[2].shape();
    shape.back() = inputs[1].shape(-1) / format_.group;
    return std::vector<mx::Shape>(has_scales_ ? 2 : 1, shape);
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    QuantizedScaleGradientArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.format = format_;
    args.sizes = quantized_sizes(format_, inputs[1], inputs[2]);
    args.w = inputs[2].data<uint32_t>();
    args.y = inputs[0].data<void>();
    args.x = inputs[1].data<void>();
    args.d_scales = has_scales_ ? outputs[0].data<void>() : nullptr;
    args.d_biases = outputs.back().data<void>();
    dispatch_cpu("quantized_scale_gradient", inputs, outputs, args, quantized_scale_gradient_cpu);
  }

  void eval_gpu_kernels(const Arrays&, Arrays&) override {
    throw_internal_error(op_, "a node for the CPU was evaluated elsewhere.");
  }

 protected:
  // With the cotangents as scales and biases, and the same codes, each gradient is a product.
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    const mx::Stream s = stream();
    const QuantizedMatrix matrix = matrix_of_cotangents(primals[2], cotangents, has_scales_, s);
    Arrays gradients;
    for (int i : argnums) {
      require_float(i);
      gradients.push_back(apply_quantized_matmul(
          op_, format_, i == 0 ? QuantizedProduct::kTransposed : QuantizedProduct::kPlain,
          primals[1 - i], matrix, s));
    }
    return gradients;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    Arrays sums;
    for (size_t i = 0; i < argnums.size(); ++i) {
      require_float(argnums[i]);
      Arrays moved = primals;
      moved[argnums[i]] = tangents[i];
      add_terms(sums, apply(moved), stream());
    }
    return sums;
  }

  // The vmap axis becomes a batch axis, with a copy of w for each element that shares it.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    Arrays front = with_vmap_in_front(inputs, axes, stream());
    if (front[2].ndim() == 3) {
      for (int i = 0; i < 2; ++i) {
        const int length = front[i].shape(0), columns = front[i].shape(-1);
        front[i] = mx::reshape(front[i], {length, rows_of(front[i]) / std::max(1, length), columns},
                               stream());
      }
    }
    Arrays outputs = apply(front);
    const std::vector<int> in_front(outputs.size(), 0);
    return {std::move(outputs), in_front};
  }

 private:
  static int rows_of(const mx::array& x) {
    return std::accumulate(x.shape().begin(), x.shape().end() - 1, 1, std::multiplies<>());
  }

  void require_float(int argument) const {
    if (argument == 2) {
      require_differentiable(1, 1);
    }
  }

  Arrays apply(const Arrays& inputs) {
    return apply_scale_gradient(op_, format_, inputs[0], inputs[1], inputs[2], has_scales_,
                                stream());
  }

  const bool has_scales_;
};

}  // namespace

Arrays apply_scale_gradient(const char* op,
                            const QuantizedFormat& format,
                            mx::array y,
                            mx::array x,
                            mx::array w,
                            bool has_scales,
                            mx::Stream s) {
  const std::vector<mx::Dtype> dtypes(has_scales ? 2 : 1, x.dtype());
  return outputs_of(std::make_shared<QuantizedScaleGradient>(s, op, format, has_scales), dtypes,
                    {std::move(y), std::move(x), std::move(w)});
}

QuantizedMatrix matrix_of_cotangents(const mx::array& w,
                                     const Arrays& cotangents,
                                     bool has_scales,
                                     mx::Stream s) {
  const mx::array& biases = cotangents.back();
  return {w, has_scales ? cotangents[0] : mx::zeros_like(biases, s), biases};
}

void add_terms(Arrays& sums, const Arrays& terms, mx::Stream s) {
  if (sums.empty()) {
    sums = terms;
    return;
  }
  for (size_t i = 0; i < terms.size(); ++i) {
    sums[i] = mx::add(sums[i], terms[i], s);
  }
}

}  // namespace mlx_anvil

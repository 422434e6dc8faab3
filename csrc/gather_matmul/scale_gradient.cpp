#include "gather_matmul/scale_gradient.h"

#include <algorithm>
#include <utility>

#include "common/allocate.h"
#include "common/evaluate.h"
#include "gather_matmul/cpu.h"
#include "gather_matmul/pairs.h"
#include "quantized_matmul/quantized_primitive.h"
#include "quantized_matmul/scale_gradient.h"

namespace mlx_anvil {

namespace {

mx::Shape shape_of_scales(const GatherScaleCall& call,
                          const mx::array& dy,
                          const mx::array& x,
                          const mx::array& w) {
  const bool transposed = call.product == QuantizedProduct::kTransposed;
  mx::Shape shape = w.shape();
  shape.back() = (transposed ? x : dy).shape(-1) / call.format.group;
  return shape;
}

// Inputs: dy, x, w, rhs, lhs if given. Outputs: d_scales if wanted, d_biases.
class GatherScaleGradient : public QuantizedPrimitive {
 public:
  GatherScaleGradient(mx::Stream stream, const GatherScaleCall& call, bool has_lhs, bool sorted)
      : QuantizedPrimitive(stream, call.op, call.format),
        call_(call),
        has_lhs_(has_lhs),
        sorted_(sorted) {}

  const char* kind() const override { return "GatherScaleGradient"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& o = static_cast<const GatherScaleGradient&>(other);
    return format_ == o.format_ && call_.product == o.call_.product &&
           call_.has_scales == o.call_.has_scales && has_lhs_ == o.has_lhs_ && sorted_ == o.sorted_;
  }

  Arrays compose(const Arrays& inputs) override {
    return compose_gather_scale_gradient(call_, inputs[0], inputs[1], inputs[2], ids(inputs),
                                         stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return std::vector<mx::Shape>(call_.has_scales ? 2 : 1,
                                  shape_of_scales(call_, inputs[0], inputs[1], inputs[2]));
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    // An input without elements makes sums without terms.
    if (inputs[0].size() == 0 || inputs[1].size() == 0) {
      for (mx::array& out : outputs) {
        set_zeros(out, stream());
      }
      return;
    }
    allocate_dense(outputs, stream());
    GatherScaleGradientArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.format = format_;
    args.product = call_.product;
    args.sizes = gather_sizes(inputs[1], ids(inputs).rhs, matrix_count(inputs[2]));
    args.sizes.columns = int64_t{outputs[0].shape(-1)} * format_.group;
    args.sizes.outputs = inputs[2].shape(-2);
    args.ids = mlx_anvil::pointers_of(ids(inputs));
    args.w = inputs[2].data<uint32_t>();
    args.dy = inputs[0].data<void>();
    args.x = inputs[1].data<void>();
    args.d_scales = call_.has_scales ? outputs[0].data<void>() : nullptr;
    args.d_biases = outputs.back().data<void>();
    dispatch_cpu("gather_scale_gradient", inputs, outputs, args, gather_scale_gradient_cpu);
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
    const PairIds pairs = ids(primals);
    const QuantizedMatrix matrix =
        matrix_of_cotangents(primals[2], cotangents, call_.has_scales, s);
    Arrays gradients;
    for (int i : argnums) {
      if (i == 0) {
        gradients.push_back(apply_gather_quantized_matmul(op_, format_, call_.product, primals[1],
                                                          matrix, pairs, s));
      } else if (i == 1) {
        const mx::array of_pairs =
            apply_gather_quantized_matmul(op_, format_, other(call_.product), primals[0], matrix,
                                          {pairs.rhs, std::nullopt, sorted_}, s);
        gradients.push_back(sum_over_pairs(of_pairs, primals[1], pairs, s));
      } else if (i == 2) {
        require_differentiable(1, 1);
      } else {
        gradients.push_back(mx::zeros_like(primals[i], s));
      }
    }
    return gradients;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    Arrays sums;
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] > 1) {
        continue;
      }
      Arrays moved = primals;
      moved[argnums[i]] = tangents[i];
      add_terms(sums, apply(moved[0], moved[1], moved[2], ids(moved)), stream());
    }
    for (const mx::Shape& shape :
         sums.empty() ? output_shapes(primals) : std::vector<mx::Shape>()) {
      sums.push_back(mx::zeros(shape, primals[0].dtype(), stream()));
    }
    return sums;
  }

  // Each element has its own sums, and a copy of w if it shares that.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    const int length = vmap_length(inputs, axes);
    const mx::array dy = repeated_over_vmap(inputs[0], axes[0], 0, length, s);
    const mx::array w = repeated_over_vmap(inputs[2], axes[2], 0, length, s);
    const int64_t experts = matrix_count(w) / std::max(1, length);
    const MappedPairs mapped = map_pairs(inputs[1], axes[1], ids(inputs), axes[3],
                                         has_lhs_ ? axes[4] : -1, experts, true, length, s);
    Arrays outputs = apply(dy, mapped.x, w, mapped.ids);
    const std::vector<int> in_front(outputs.size(), 0);
    return {std::move(outputs), in_front};
  }

 private:
  PairIds ids(const Arrays& inputs) const { return ids_of(inputs, has_lhs_, sorted_); }

  Arrays apply(mx::array dy, mx::array x, mx::array w, PairIds pairs) {
    return apply_gather_scale_gradient(call_, std::move(dy), std::move(x), std::move(w),
                                       std::move(pairs), stream());
  }

  const GatherScaleCall call_;
  const bool has_lhs_, sorted_;
};

}  // namespace

Arrays apply_gather_scale_gradient(const GatherScaleCall& call,
                                   mx::array dy,
                                   mx::array x,
                                   mx::array w,
                                   PairIds ids,
                                   mx::Stream s) {
  const std::vector<mx::Dtype> dtypes(call.has_scales ? 2 : 1, x.dtype());
  Arrays inputs = {std::move(dy), std::move(x), std::move(w)};
  append(inputs, ids);
  return outputs_of(std::make_shared<GatherScaleGradient>(s, call, ids.lhs.has_value(), ids.sorted),
                    dtypes, std::move(inputs));
}

Arrays compose_gather_scale_gradient(const GatherScaleCall& call,
                                     const mx::array& dy,
                                     const mx::array& x,
                                     const mx::array& w,
                                     const PairIds& ids,
                                     mx::Stream s) {
  const mx::array wide_dy = mx::astype(dy, mx::float32, s), wide_x = mx::astype(x, mx::float32, s);
  mx::array of_w = apply_gather_outer(wide_dy, wide_x, ids, static_cast<int>(matrix_count(w)), s);
  if (call.product == QuantizedProduct::kPlain) {
    of_w = mx::swapaxes(of_w, -1, -2, s);
  }
  mx::Shape shape = shape_of_scales(call, dy, x, w);
  shape.back() *= call.format.group;
  of_w = mx::reshape(of_w, shape, s);
  Arrays gradients;
  if (call.has_scales) {
    gradients.push_back(compose_scale_gradient(call.format, of_w, w, s));
  }
  gradients.push_back(compose_bias_gradient(call.format, of_w, s));
  for (mx::array& gradient : gradients) {
    gradient = mx::astype(gradient, x.dtype(), s);
  }
  return gradients;
}

}  // namespace mlx_anvil

// gather_quantized_matmul as a primitive. Inputs: x, w, scales, biases if affine, rhs, lhs if
// given.
#include <algorithm>
#include <utility>

#include "common/allocate.h"
#include "common/evaluate.h"
#include "gather_matmul/cpu.h"
#include "gather_matmul/gpu.h"
#include "gather_matmul/pairs.h"
#include "gather_matmul/scale_gradient.h"
#include "quantized_matmul/quantized_primitive.h"

namespace mlx_anvil {

namespace {

class GatherQuantizedMatmul : public QuantizedPrimitive {
 public:
  GatherQuantizedMatmul(mx::Stream stream,
                        const char* op,
                        const QuantizedFormat& format,
                        QuantizedProduct product,
                        bool has_lhs,
                        bool sorted)
      : QuantizedPrimitive(stream, op, format),
        product_(product),
        has_lhs_(has_lhs),
        sorted_(sorted) {}

  const char* kind() const override { return "GatherQuantizedMatmul"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& o = static_cast<const GatherQuantizedMatmul&>(other);
    return format_ == o.format_ && product_ == o.product_ && has_lhs_ == o.has_lhs_ &&
           sorted_ == o.sorted_;
  }

  // Takes each pair's matrix. Scales and biases are wide before, so that their gradients accumulate
  // in float32.
  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const QuantizedMatrix all = matrix(inputs);
    const mx::array experts = inner_ids(ids(inputs).rhs, matrix_count(all.w), s);
    const auto take = [&](const mx::array& x) {
      return mx::take(flat_matrices(x, s), experts, 0, s);
    };
    const auto wide = [&](const mx::array& x) { return mx::astype(x, mx::float32, s); };
    const QuantizedMatrix taken = {
        take(all.w), take(format_.has_biases() ? wide(all.scales) : all.scales),
        all.biases ? std::optional(take(wide(*all.biases))) : std::nullopt};
    return {compose_quantized_matmul(format_, product_, lefts_of_pairs(inputs[0], ids(inputs), s),
                                     taken, s)};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = ids(inputs).rhs.shape();
    shape.push_back(inputs[0].shape(-2));
    shape.push_back(product_ == QuantizedProduct::kTransposed
                        ? inputs[1].shape(-2)
                        : inputs[2].shape(-1) * format_.group);
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (is_trivial_product(inputs[0], outputs[0], stream())) {
      return;
    }
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    GatherQuantizedArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.format = format_;
    args.product = product_;
    args.sizes = sizes(inputs);
    args.ids = pointers_of(ids(inputs));
    args.weights = mlx_anvil::pointers_of(weights_at(format_, inputs, 1));
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    dispatch_cpu(product_ == QuantizedProduct::kTransposed ? "gather_quantized_matmul_transposed"
                                                           : "gather_quantized_matmul_plain",
                 inputs, outputs, args, gather_quantized_matmul_cpu);
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (is_trivial_product(inputs[0], outputs[0], stream())) {
      return;
    }
    std::string why_not;
    if (can_launch_gather(sizes(inputs), stream(), &why_not)) {
      gather_quantized_matmul_gpu(format_, sizes(inputs), product_, inputs[0],
                                  weights_at(format_, inputs, 1), ids(inputs), outputs[0],
                                  stream());
      return;
    }
    const auto graph = [this](const Arrays& in) {
      const QuantizedMatrix all = matrix(in);
      const PairIds own = inner_pairs(ids(in), in[0], all.w, stream());
      return mx::gather_qmm(in[0], all.w, all.scales, all.biases, own.lhs, own.rhs,
                            product_ == QuantizedProduct::kTransposed, format_.group, format_.bits,
                            mode_name(format_.kind), std::nullopt, sorted_, stream());
    };
    run_mlx_kernel(op_, {"mx.gather_qmm", "the kernels do not take the call"}, graph, inputs,
                   outputs[0], stream());
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    const mx::Stream s = stream();
    const PairIds pairs = ids(primals);
    Arrays of_weights, gradients;
    for (int i : argnums) {
      if (i == 0) {
        const mx::array of_pairs =
            apply_gather_quantized_matmul(op_, format_.exact(), other(product_), cotangents[0],
                                          matrix(primals), {pairs.rhs, std::nullopt, sorted_}, s);
        gradients.push_back(sum_over_pairs(of_pairs, primals[0], pairs, s));
      } else if (is_id(i)) {
        gradients.push_back(mx::zeros_like(primals[i], s));
      } else {
        require_differentiable(i, 1);
        if (of_weights.empty()) {
          of_weights = weight_gradients(primals, cotangents[0], argnums);
        }
        gradients.push_back(
            mx::astype(i == 2 ? of_weights.front() : of_weights.back(), primals[i].dtype(), s));
      }
    }
    return gradients;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    const mx::Stream s = stream();
    const auto sum = product_tangent(
        primals, tangents, argnums, [&](const mx::array& x, const QuantizedMatrix& weights) {
          return apply_gather_quantized_matmul(op_, format_.exact(), product_, x, weights,
                                               ids(primals), s);
        });
    return {sum ? *sum : mx::zeros(output_shapes(primals)[0], primals[0].dtype(), s)};
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    const size_t rhs = 1 + arrays_per_matrix();
    const int length = vmap_length(inputs, axes);
    const bool own =
        std::any_of(axes.begin() + 1, axes.begin() + rhs, [](int a) { return a >= 0; });
    Arrays front = inputs;
    for (size_t i = 1; i < rhs && own; ++i) {
      front[i] = repeated_over_vmap(inputs[i], axes[i], 0, length, s);
    }
    const int64_t experts = matrix_count(front[1]) / (own ? std::max(1, length) : 1);
    const MappedPairs mapped = map_pairs(inputs[0], axes[0], ids(inputs), axes[rhs],
                                         has_lhs_ ? axes[rhs + 1] : -1, experts, own, length, s);
    return {{apply_gather_quantized_matmul(op_, format_, product_, mapped.x, matrix(front),
                                           mapped.ids, s)},
            {0}};
  }

 private:
  QuantizedMatrix matrix(const Arrays& inputs) const { return matrix_at(format_, inputs, 1); }
  PairIds ids(const Arrays& inputs) const { return ids_of(inputs, has_lhs_, sorted_); }
  bool is_id(int argument) const { return argument > static_cast<int>(arrays_per_matrix()); }

  GatherSizes sizes(const Arrays& inputs) const {
    GatherSizes sizes = gather_sizes(inputs[0], ids(inputs).rhs, matrix_count(inputs[1]));
    sizes.columns = int64_t{inputs[2].shape(-1)} * format_.group;
    sizes.outputs = inputs[1].shape(-2);
    return sizes;
  }

  // In scales, if asked for, and biases.
  Arrays weight_gradients(const Arrays& primals,
                          const mx::array& cotangent,
                          const std::vector<int>& argnums) {
    const bool has_scales = std::find(argnums.begin(), argnums.end(), 2) != argnums.end();
    const GatherScaleCall call = {op_, format_, product_, has_scales};
    if (launches_kernels()) {
      note_fallback(op_, "the gradient of GatherQuantizedMatmul is a graph of MLX ops");
      return compose_gather_scale_gradient(call, cotangent, primals[0], primals[1], ids(primals),
                                           stream());
    }
    return apply_gather_scale_gradient(call, cotangent, primals[0], primals[1], ids(primals),
                                       stream());
  }

  const QuantizedProduct product_;
  const bool has_lhs_, sorted_;
};

}  // namespace

mx::array apply_gather_quantized_matmul(const char* op,
                                        const QuantizedFormat& format,
                                        QuantizedProduct product,
                                        mx::array x,
                                        QuantizedMatrix matrix,
                                        PairIds ids,
                                        mx::Stream s) {
  const mx::Dtype dtype = x.dtype();
  Arrays inputs = inputs_with(std::move(x), std::move(matrix));
  append(inputs, ids);
  return output_of(std::make_shared<GatherQuantizedMatmul>(s, op, format, product,
                                                           ids.lhs.has_value(), ids.sorted),
                   dtype, std::move(inputs));
}

mx::array apply_gather_projection(const char* op,
                                  const QuantizedFormat& format,
                                  mx::array x,
                                  const ExpertMatrix& projection,
                                  const PairIds& ids,
                                  mx::Stream s) {
  const mx::array product = apply_gather_quantized_matmul(op, format, QuantizedProduct::kTransposed,
                                                          std::move(x), projection.matrix, ids, s);
  if (!projection.bias) {
    return product;
  }
  const mx::array rows = flat_matrices(mx::expand_dims(*projection.bias, -2, s), s);
  return mx::add(product, mx::take(rows, inner_ids(ids.rhs, rows.shape(0), s), 0, s), s);
}

}  // namespace mlx_anvil

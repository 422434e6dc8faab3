// gather_matmul as a primitive. Inputs: x, w, rhs, lhs if given.
#include <algorithm>
#include <string>
#include <utility>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/evaluate.h"
#include "common/mlx_ops.h"
#include "common/run_on_cpu.h"
#include "common/vmap_axis.h"
#include "gather_matmul/cpu.h"
#include "gather_matmul/gather_matmul.h"
#include "gather_matmul/gpu.h"
#include "gather_matmul/pairs.h"

namespace mlx_anvil {

namespace {

// True if w [..., K, N] is a view of row-contiguous [..., N, K].
bool is_transposed(const mx::array& w) {
  int64_t stride = int64_t{w.shape(-1)} * w.shape(-2);
  if (w.strides(-2) != 1 || w.strides(-1) != w.shape(-2)) {
    return false;
  }
  for (int axis = static_cast<int>(w.ndim()) - 3; axis >= 0; --axis) {
    if (w.shape(axis) != 1 && w.strides(axis) != stride) {
      return false;
    }
    stride *= w.shape(axis);
  }
  return true;
}

class GatherMatmul : public FusedPrimitive {
 public:
  GatherMatmul(mx::Stream stream, bool has_lhs, bool sorted)
      : FusedPrimitive(stream), has_lhs_(has_lhs), sorted_(sorted) {}

  const char* op() const override { return kGatherMatmul; }
  const char* kind() const override { return "GatherMatmul"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& o = static_cast<const GatherMatmul&>(other);
    return has_lhs_ == o.has_lhs_ && sorted_ == o.sorted_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const auto wide = [&](const mx::array& x) { return mx::astype(x, mx::float32, s); };
    const mx::array experts = inner_ids(ids(inputs).rhs, matrix_count(inputs[1]), s);
    const mx::array taken = mx::take(flat_matrices(wide(inputs[1]), s), experts, 0, s);
    const mx::array left = lefts_of_pairs(wide(inputs[0]), ids(inputs), s);
    return {mx::astype(matrix_product(left, taken, s), inputs[0].dtype(), s)};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = ids(inputs).rhs.shape();
    shape.push_back(inputs[0].shape(-2));
    shape.push_back(inputs[1].shape(-1));
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (is_trivial_product(inputs[0], outputs[0], stream())) {
      return;
    }
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    GatherDenseArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.product = product(inputs);
    args.sizes = sizes(inputs);
    args.ids = pointers_of(ids(inputs));
    args.w = inputs[1].data<void>();
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    run_on_cpu(
        *this, inputs, outputs, [args] { gather_matmul_cpu(args); },
        [&] { return kernel_text(inputs); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (is_trivial_product(inputs[0], outputs[0], stream())) {
      return;
    }
    std::string why_not;
    if (can_launch_gather_dense(sizes(inputs), stream(), &why_not)) {
      gather_matmul_gpu(sizes(inputs), product(inputs), inputs[0], inputs[1], ids(inputs),
                        outputs[0], stream());
      return;
    }
    const auto graph = [this](const Arrays& in) {
      const PairIds own = inner_pairs(ids(in), in[0], in[1], stream());
      const auto wide = [&](const mx::array& x) {  // MLX 0.32.4 has no other dtype on the CPU
        return stream().device == mx::Device::cpu ? mx::astype(x, mx::float32, stream()) : x;
      };
      return mx::astype(
          mx::gather_mm(wide(in[0]), wide(in[1]), own.lhs, own.rhs, sorted_, stream()),
          in[0].dtype(), stream());
    };
    run_mlx_kernel(op(), {"mx.gather_mm", "the kernels do not take the call"}, graph, inputs,
                   outputs[0], stream());
  }

 protected:
  bool wants_dense(size_t) const override { return true; }
  bool takes(size_t i, const mx::array& x) const override { return i == 1 && is_transposed(x); }
  bool copies_primal(size_t i) const override { return i != 1; }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    const mx::Stream s = stream();
    const PairIds pairs = ids(primals);
    Arrays gradients;
    for (int i : argnums) {
      if (i == 0) {
        const mx::array of_pairs =
            apply_gather_matmul(cotangents[0], mx::swapaxes(primals[1], -1, -2, s),
                                {pairs.rhs, std::nullopt, sorted_}, s);
        gradients.push_back(sum_over_pairs(of_pairs, primals[0], pairs, s));
      } else if (i == 1) {
        const int experts = static_cast<int>(matrix_count(primals[1]));
        const mx::array of_w = mx::swapaxes(
            apply_gather_outer(cotangents[0], primals[0], pairs, experts, s), -1, -2, s);
        gradients.push_back(mx::reshape(of_w, primals[1].shape(), s));
      } else {
        gradients.push_back(mx::zeros_like(primals[i], s));
      }
    }
    return gradients;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    const mx::Stream s = stream();
    const auto sum =
        product_tangent(primals, tangents, argnums, s, [&](const mx::array& x, const mx::array& w) {
          return apply_gather_matmul(x, w, ids(primals), s);
        });
    return {sum ? *sum : mx::zeros(output_shapes(primals)[0], primals[0].dtype(), s)};
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    const int length = vmap_length(inputs, axes);
    const bool own = axes[1] >= 0;
    const mx::array w = own ? mx::moveaxis(inputs[1], axes[1], 0, s) : inputs[1];
    const int64_t experts = matrix_count(w) / (own ? std::max(1, length) : 1);
    const MappedPairs mapped = map_pairs(inputs[0], axes[0], ids(inputs), axes[2],
                                         has_lhs_ ? axes[3] : -1, experts, own, length, s);
    return {{apply_gather_matmul(mapped.x, w, mapped.ids, s)}, {0}};
  }

 private:
  PairIds ids(const Arrays& inputs) const { return ids_of(inputs, has_lhs_, sorted_); }

  // Both axes of a matrix with one row or column may count as transposed.
  QuantizedProduct product(const Arrays& inputs) const {
    return inputs[1].flags().row_contiguous ? QuantizedProduct::kPlain
                                            : QuantizedProduct::kTransposed;
  }

  GatherSizes sizes(const Arrays& inputs) const {
    GatherSizes sizes = gather_sizes(inputs[0], ids(inputs).rhs, matrix_count(inputs[1]));
    const bool transposed = product(inputs) == QuantizedProduct::kTransposed;
    sizes.columns = inputs[1].shape(transposed ? -2 : -1);
    sizes.outputs = inputs[1].shape(transposed ? -1 : -2);
    return sizes;
  }

  std::string kernel_text(const Arrays& inputs) const {
    const bool transposed = product(inputs) == QuantizedProduct::kTransposed;
    return std::string("gather_matmul_") + (transposed ? "transposed_" : "plain_") +
           to_text(inputs[0].dtype());
  }

  const bool has_lhs_, sorted_;
};

}  // namespace

mx::array apply_gather_matmul(mx::array x, mx::array w, PairIds ids, mx::Stream s) {
  const mx::Dtype dtype = x.dtype();
  Arrays inputs = {std::move(x), std::move(w)};
  append(inputs, ids);
  return output_of(std::make_shared<GatherMatmul>(s, ids.lhs.has_value(), ids.sorted), dtype,
                   std::move(inputs));
}

}  // namespace mlx_anvil

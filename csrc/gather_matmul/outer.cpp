// The gradient of gathered products in dense weights: a sum of outer products for each expert, as a
// primitive. Inputs: y, x, rhs, lhs if given.
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
#include "gather_matmul/pairs.h"

namespace mlx_anvil {

namespace {

// The same as products of segments of sorted pairs, in MLX ops that run on a GPU.
mx::array by_segments(
    const mx::array& y, const mx::array& x, const PairIds& ids, int experts, mx::Stream s) {
  const int pairs = static_cast<int>(ids.rhs.size()), rows = y.shape(-2);
  const mx::array of_pairs = mx::flatten(inner_ids(ids.rhs, experts, s), s);
  const mx::array order = mx::argsort(of_pairs, 0, s);
  const int lefts = static_cast<int>(matrix_count(x));
  const mx::array of_x = ids.lhs
                             ? mx::take(mx::flatten(inner_ids(*ids.lhs, lefts, s), s), order, 0, s)
                             : mx::floor_divide(order, mx::array(pairs / lefts, order.dtype()), s);
  const auto sorted = [&](const mx::array& matrices, const mx::array& places) {
    const mx::array taken = mx::take(flat_matrices(matrices, s), places, 0, s);
    return mx::reshape(taken, {pairs * rows, matrices.shape(-1)}, s);
  };
  const mx::array counts = mx::scatter_add(mx::zeros({experts}, mx::uint32, s), of_pairs,
                                           mx::full({pairs, 1}, rows, mx::uint32, s), 0, s);
  const mx::array ends = mx::cumsum(counts, 0, false, true, s);
  const mx::array segments = mx::stack({mx::subtract(ends, counts, s), ends}, -1, s);
  return mx::segmented_mm(mx::swapaxes(sorted(y, order), 0, 1, s), sorted(x, of_x), segments, s);
}

class GatherOuter : public FusedPrimitive {
 public:
  GatherOuter(mx::Stream stream, int experts, bool has_lhs, bool sorted)
      : FusedPrimitive(stream), experts_(experts), has_lhs_(has_lhs), sorted_(sorted) {}

  const char* op() const override { return kGatherMatmul; }
  const char* kind() const override { return "GatherOuter"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& o = static_cast<const GatherOuter&>(other);
    return experts_ == o.experts_ && has_lhs_ == o.has_lhs_ && sorted_ == o.sorted_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const auto wide = [&](const mx::array& x) { return mx::astype(x, mx::float32, s); };
    const mx::array left = lefts_of_pairs(wide(inputs[1]), ids(inputs), s);
    const mx::array products = matrix_product(mx::swapaxes(wide(inputs[0]), -1, -2, s), left, s);
    const mx::Shape shape = output_shapes(inputs)[0];
    const mx::array updates = mx::expand_dims(products, -3, s);
    const mx::array sums = mx::scatter_add(mx::zeros(shape, mx::float32, s),
                                           inner_ids(ids(inputs).rhs, experts_, s), updates, 0, s);
    return {mx::astype(sums, inputs[0].dtype(), s)};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {{experts_, inputs[0].shape(-1), inputs[1].shape(-1)}};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (is_trivial(inputs, outputs[0])) {
      return;
    }
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    GatherOuterArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.sizes = gather_sizes(inputs[1], ids(inputs).rhs, experts_);
    args.sizes.columns = inputs[1].shape(-1);
    args.sizes.outputs = inputs[0].shape(-1);
    args.ids = pointers_of(ids(inputs));
    args.y = inputs[0].data<void>();
    args.x = inputs[1].data<void>();
    args.out = outputs[0].data<void>();
    run_on_cpu(
        *this, inputs, outputs, [args] { gather_outer_cpu(args); },
        [&] { return "gather_outer_" + to_text(inputs[0].dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (is_trivial(inputs, outputs[0])) {
      return;
    }
    const auto graph = [this](const Arrays& in) {
      return by_segments(in[0], in[1], ids(in), experts_, stream());
    };
    run_mlx_kernel(op(), {"mx.segmented_mm", "there is no kernel"}, graph, inputs, outputs[0],
                   stream());
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    const mx::Stream s = stream();
    const PairIds pairs = ids(primals);
    Arrays gradients;
    for (int i : argnums) {
      if (i == 0) {
        gradients.push_back(
            apply_gather_matmul(primals[1], mx::swapaxes(cotangents[0], -1, -2, s), pairs, s));
      } else if (i == 1) {
        const mx::array of_pairs =
            apply_gather_matmul(primals[0], cotangents[0], {pairs.rhs, std::nullopt, sorted_}, s);
        gradients.push_back(sum_over_pairs(of_pairs, primals[1], pairs, s));
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
        product_tangent(primals, tangents, argnums, s, [&](const mx::array& y, const mx::array& x) {
          return apply_gather_outer(y, x, ids(primals), experts_, s);
        });
    return {sum ? *sum : mx::zeros(output_shapes(primals)[0], primals[0].dtype(), s)};
  }

  // Each element has its own sums.
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    const int length = vmap_length(inputs, axes);
    const mx::array y = repeated_over_vmap(inputs[0], axes[0], 0, length, s);
    const MappedPairs mapped = map_pairs(inputs[1], axes[1], ids(inputs), axes[2],
                                         has_lhs_ ? axes[3] : -1, experts_, true, length, s);
    const mx::array sums = apply_gather_outer(y, mapped.x, mapped.ids, length * experts_, s);
    return {{mx::reshape(sums, {length, experts_, sums.shape(-2), sums.shape(-1)}, s)}, {0}};
  }

 private:
  PairIds ids(const Arrays& inputs) const { return ids_of(inputs, has_lhs_, sorted_); }

  bool is_trivial(const Arrays& inputs, mx::array& out) {
    return is_trivial_product(inputs[0], out, stream()) ||
           is_trivial_product(inputs[1], out, stream());
  }

  const int experts_;
  const bool has_lhs_, sorted_;
};

}  // namespace

mx::array apply_gather_outer(mx::array y, mx::array x, PairIds ids, int experts, mx::Stream s) {
  const mx::Dtype dtype = y.dtype();
  Arrays inputs = {std::move(y), std::move(x)};
  append(inputs, ids);
  return output_of(std::make_shared<GatherOuter>(s, experts, ids.lhs.has_value(), ids.sorted),
                   dtype, std::move(inputs));
}

}  // namespace mlx_anvil

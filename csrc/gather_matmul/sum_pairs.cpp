#include "gather_matmul/sum_pairs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/evaluate.h"
#include "common/launch.h"
#include "common/run_on_cpu.h"
#include "common/vmap_axis.h"
#include "gather_matmul/cpu.h"
#include "gather_matmul/gather_matmul.h"
#include "gather_matmul/gpu.h"
#include "gather_matmul/pairs.h"

namespace mlx_anvil {

namespace {

// Inputs: x, ids.
class SumPairs : public FusedPrimitive {
 public:
  SumPairs(mx::Stream stream, int count) : FusedPrimitive(stream), count_(count) {}

  const char* op() const override { return kGatherMatmul; }
  const char* kind() const override { return "GatherSumPairs"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           count_ == static_cast<const SumPairs&>(other).count_;
  }

  Arrays compose(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::array updates =
        mx::expand_dims(mx::astype(inputs[0], mx::float32, s), inputs[1].ndim(), s);
    const mx::array zeros = mx::zeros(output_shapes(inputs)[0], mx::float32, s);
    const mx::array sums = mx::scatter_add(zeros, inner_ids(inputs[1], count_, s), updates, 0, s);
    return {mx::astype(sums, inputs[0].dtype(), s)};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape(inputs[0].shape().begin() + inputs[1].ndim(), inputs[0].shape().end());
    shape.insert(shape.begin(), count_);
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (is_trivial_product(inputs[0], outputs[0], stream())) {
      return;
    }
    outputs[0].set_data(allocate(outputs[0].nbytes(), stream()));
    SumPairsArgs args{};
    args.dtype = kernel_dtype_of(inputs[0]);
    args.pairs = static_cast<int64_t>(inputs[1].size());
    args.count = count_;
    args.columns = static_cast<int64_t>(inputs[0].size()) / args.pairs;
    args.ids = inputs[1].data<int32_t>();
    args.x = inputs[0].data<void>();
    args.out = outputs[0].data<void>();
    run_on_cpu(
        *this, inputs, outputs, [args] { sum_pairs_cpu(args); },
        [&] { return "gather_sum_pairs_" + to_text(inputs[0].dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    if (is_trivial_product(inputs[0], outputs[0], stream())) {
      return;
    }
    // MLX's scatter adds with atomics, in an order that differs from run to run.
    const auto graph = [this](const Arrays& in) -> Arrays {
      const mx::array ids = mx::flatten(inner_ids(in[0], count_, stream()), stream());
      const mx::array order = mx::argsort(ids, 0, stream());
      return {order, mx::take(ids, order, 0, stream())};
    };
    Arrays sorted = evaluated(graph, {inputs[1]}, stream());
    sum_pairs_gpu(inputs[0], sorted[0], sorted[1], outputs[0], stream());
    keep_until_done(std::move(sorted), stream());
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays&) override {
    Arrays gradients;
    for (int i : argnums) {
      gradients.push_back(
          i == 0 ? mx::take(cotangents[0], inner_ids(primals[1], count_, stream()), 0, stream())
                 : mx::zeros_like(primals[i], stream()));
    }
    return gradients;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    return {argnums[0] == 0 ? apply_sum_pairs(tangents[0], primals[1], count_, stream())
                            : mx::zeros(output_shapes(primals)[0], primals[0].dtype(), stream())};
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::Stream s = stream();
    const int length = vmap_length(inputs, axes);
    const mx::array x = repeated_over_vmap(inputs[0], axes[0], 0, length, s);
    const mx::array sums =
        apply_sum_pairs(x, own_ids(inputs[1], axes[1], count_, length, s), length * count_, s);
    return {{mx::unflatten(sums, 0, {length, count_}, s)}, {0}};
  }

 private:
  const int count_;
};

}  // namespace

mx::array apply_sum_pairs(mx::array x, mx::array ids, int count, mx::Stream s) {
  const mx::Dtype dtype = x.dtype();
  Arrays inputs = {std::move(x), std::move(ids)};
  return output_of(std::make_shared<SumPairs>(s, count), dtype, std::move(inputs));
}

}  // namespace mlx_anvil

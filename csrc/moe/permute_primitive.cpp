// The primitives of moe_permute: the sort by expert with the rows, and the rows alone.
#include <algorithm>
#include <limits>
#include <string>

#include "common/allocate.h"
#include "common/cache_size.h"
#include "common/checks.h"
#include "common/launch.h"
#include "common/run_on_cpu.h"
#include "common/trace.h"
#include "common/vmap_axis.h"
#include "moe/compose.h"
#include "moe/cpu.h"
#include "moe/gpu.h"
#include "moe/primitive.h"

namespace mlx_anvil {

namespace {

enum Output : size_t { kOffsets, kOrder, kInverse, kSorted, kRows };

MoeSpreadArgs spread_args(const MoeSizes& sizes,
                          const mx::array& x,
                          const mx::array& inverse,
                          mx::array& out) {
  MoeSpreadArgs args{};
  args.sizes = sizes;
  args.row_bytes = sizes.columns * static_cast<int64_t>(x.itemsize());
  args.x = x.data<void>();
  args.inverse = inverse.data<int32_t>();
  args.out = out.data<void>();
  args.stream_outputs = streams_outputs(static_cast<int64_t>(x.nbytes() + out.nbytes()));
  return args;
}

// Inputs: ids, x. Outputs: offsets, order, inverse, sorted, rows.
class MoePermute : public FusedPrimitive {
 public:
  MoePermute(mx::Stream stream, int64_t experts, int batch_axes)
      : FusedPrimitive(stream), experts_(experts), batch_axes_(batch_axes) {}

  const char* op() const override { return kMoePermute; }
  const char* kind() const override { return "MoePermute"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& own = static_cast<const MoePermute&>(other);
    return experts_ == own.experts_ && batch_axes_ == own.batch_axes_;
  }

  Arrays compose(const Arrays& inputs) override {
    Arrays outputs = compose_moe_sort(inputs[0], experts_, batch_axes_, stream());
    outputs.push_back(compose_moe_spread(inputs[1], outputs[kInverse], batch_axes_, stream()));
    return outputs;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::array& ids = inputs[0];
    const int pairs = static_cast<int>(sizes_of(inputs).pairs());
    const auto shape = [&](mx::Shape last) { return moe_batch_shape(ids, batch_axes_, last); };
    return {shape({static_cast<int>(experts_) + 1}), shape({pairs}), ids.shape(), shape({pairs}),
            shape({pairs, inputs[1].shape(-1)})};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    MoeSortArgs sort{};
    sort.sizes = sizes_of(inputs);
    sort.experts = experts_;
    sort.ids = inputs[0].data<void>();
    sort.ids_are_signed = inputs[0].dtype() == mx::int32;
    sort.offsets = outputs[kOffsets].data<int32_t>();
    sort.order = outputs[kOrder].data<int32_t>();
    sort.inverse = outputs[kInverse].data<int32_t>();
    sort.sorted = outputs[kSorted].data<int32_t>();
    const MoeSpreadArgs spread =
        spread_args(sort.sizes, inputs[1], outputs[kInverse], outputs[kRows]);
    run_on_cpu(
        *this, inputs, outputs,
        [sort, spread] {
          moe_sort_cpu(sort);
          moe_spread_cpu(spread);
        },
        [&] { return "moe_permute_" + to_text(inputs[1].dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs, stream());
    moe_permute_gpu(sizes_of(inputs), experts_, inputs[0], inputs[1], outputs, stream());
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  // The gradient of a token is the sum of those of its rows. Integers have none.
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override {
    Arrays gradients;
    for (int i : argnums) {
      gradients.push_back(i == 0 ? mx::zeros_like(primals[0], stream())
                                 : apply_moe_combine({cotangents[kRows], outputs[kInverse]},
                                                     batch_axes_, stream()));
    }
    return gradients;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    const Arrays outputs =
        apply_moe_permute(primals[1], primals[0], experts_, batch_axes_, stream());
    Arrays all;
    for (const mx::array& out : outputs) {
      all.push_back(mx::zeros_like(out, stream()));
    }
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] == 1) {
        all[kRows] = apply_moe_spread(tangents[i], outputs[kInverse], batch_axes_, stream());
      }
    }
    return all;
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    Arrays in = with_vmap_in_front(inputs, axes, stream());
    Arrays outputs = apply_moe_permute(in[1], in[0], experts_, batch_axes_ + 1, stream());
    std::vector<int> out_axes(outputs.size(), 0);
    return {std::move(outputs), std::move(out_axes)};
  }

 private:
  MoeSizes sizes_of(const Arrays& inputs) const {
    return moe_sizes(inputs[0], batch_axes_, inputs[1].shape(-1));
  }

  const int64_t experts_;
  const int batch_axes_;
};

// Inputs: x, inverse. Output: rows.
class MoeSpread : public FusedPrimitive {
 public:
  MoeSpread(mx::Stream stream, int batch_axes) : FusedPrimitive(stream), batch_axes_(batch_axes) {}

  const char* op() const override { return kMoePermute; }
  const char* kind() const override { return "MoeSpread"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           batch_axes_ == static_cast<const MoeSpread&>(other).batch_axes_;
  }

  Arrays compose(const Arrays& inputs) override {
    return {compose_moe_spread(inputs[0], inputs[1], batch_axes_, stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const int pairs = static_cast<int>(sizes_of(inputs).pairs());
    return {moe_batch_shape(inputs[1], batch_axes_, {pairs, inputs[0].shape(-1)})};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs[0], stream());
    const MoeSpreadArgs args = spread_args(sizes_of(inputs), inputs[0], inputs[1], outputs[0]);
    run_on_cpu(
        *this, inputs, outputs, [args] { moe_spread_cpu(args); },
        [&] { return "moe_spread_" + to_text(inputs[0].dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs[0], stream());
    moe_spread_gpu(sizes_of(inputs), inputs[0], inputs[1], outputs[0], stream());
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
          i == 1 ? mx::zeros_like(primals[1], stream())
                 : apply_moe_combine({cotangents[0], primals[1]}, batch_axes_, stream()));
    }
    return gradients;
  }

  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override {
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] == 0) {
        return {apply_moe_spread(tangents[i], primals[1], batch_axes_, stream())};
      }
    }
    return {mx::zeros(output_shapes(primals)[0], primals[0].dtype(), stream())};
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const Arrays in = with_vmap_in_front(inputs, axes, stream());
    return {{apply_moe_spread(in[0], in[1], batch_axes_ + 1, stream())}, {0}};
  }

 private:
  MoeSizes sizes_of(const Arrays& inputs) const {
    return moe_sizes(inputs[1], batch_axes_, inputs[0].shape(-1));
  }

  const int batch_axes_;
};

}  // namespace

namespace {

bool has_sort_kernels(const MoeSizes& sizes,
                      int64_t experts,
                      const mx::Stream& stream,
                      std::string* why_not) {
  if (experts > kMostMoeExperts) {
    *why_not = "the kernels take at most 4096 experts";
    return false;
  }
  return has_moe_kernels(sizes, stream, why_not);
}

}  // namespace

bool has_moe_kernels(const MoeSizes& sizes, const mx::Stream& stream, std::string* why_not) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (sizes.batches * std::max(sizes.pairs(), sizes.tokens) > kMost) {
    *why_not = "the kernels take at most 2^31 - 1 rows";
    return false;
  }
  return stream.device == mx::Device::cpu || can_launch(stream.device, why_not);
}

Arrays apply_moe_permute(
    mx::array x, mx::array ids, int64_t experts, int batch_axes, mx::Stream s) {
  auto primitive = std::make_shared<MoePermute>(s, experts, batch_axes);
  const MoeSizes sizes = moe_sizes(ids, batch_axes, 0);
  std::vector<mx::Dtype> dtypes(4, mx::int32);
  dtypes.push_back(x.dtype());
  Arrays inputs = {std::move(ids), std::move(x)};
  std::string why_not;
  if (!has_sort_kernels(sizes, experts, s, &why_not)) {
    note_fallback(kMoePermute, why_not);
    return primitive->compose(inputs);
  }
  return outputs_of(std::move(primitive), dtypes, std::move(inputs));
}

mx::array apply_moe_spread(mx::array x, mx::array inverse, int batch_axes, mx::Stream s) {
  auto primitive = std::make_shared<MoeSpread>(s, batch_axes);
  const MoeSizes sizes = moe_sizes(inverse, batch_axes, x.shape(-1));
  const mx::Dtype dtype = x.dtype();
  Arrays inputs = {std::move(x), std::move(inverse)};
  std::string why_not;
  if (!has_moe_kernels(sizes, s, &why_not)) {
    note_fallback(kMoePermute, why_not);
    return primitive->compose(inputs)[0];
  }
  return output_of(std::move(primitive), dtype, std::move(inputs));
}

}  // namespace mlx_anvil

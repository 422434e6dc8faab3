#include "distributed/exchange.h"

#include "common/allocate.h"
#include "common/mlx_ops.h"
#include "common/vmap_axis.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_anvil {

namespace {

std::vector<mx::Shape> shapes_of_first(const Arrays& inputs, size_t count) {
  std::vector<mx::Shape> shapes;
  for (size_t i = 0; i < count; ++i) {
    shapes.push_back(inputs[i].shape());
  }
  return shapes;
}

std::pair<Arrays, Arrays> split_at(const Arrays& inputs, size_t count) {
  const auto middle = inputs.begin() + static_cast<std::ptrdiff_t>(count);
  return {Arrays(inputs.begin(), middle), Arrays(middle, inputs.end())};
}

// Tangents of the first `count` primals, zeros where there is none, and those of the rest.
struct Tangents {
  Tangents(const Arrays& primals,
           const Arrays& tangents,
           const std::vector<int>& argnums,
           size_t count,
           mx::Stream s) {
    for (size_t i = 0; i < count; ++i) {
      own.push_back(mx::zeros_like(primals[i], s));
    }
    for (size_t i = 0; i < argnums.size(); ++i) {
      const auto at = static_cast<size_t>(argnums[i]);
      if (at < count) {
        own[at] = tangents[i];
      } else {
        after.push_back(tangents[i]);
      }
    }
  }

  Arrays own, after;
};

// Inputs: `count` arrays that pass through, and what has to be there before.
class Ordered : public mx::Primitive {
 public:
  Ordered(mx::Stream stream, size_t count) : mx::Primitive(stream), count_(count) {}

  const char* name() const override { return "MlxAnvilOrdered"; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override { eval(inputs, outputs); }
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override { eval(inputs, outputs); }

  bool is_equivalent(const mx::Primitive& other) const override {
    return count_ == static_cast<const Ordered&>(other).count_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return shapes_of_first(inputs, count_);
  }

  Arrays vjp(const Arrays& primals,
             const Arrays& cotangents,
             const std::vector<int>& argnums,
             const Arrays&) override {
    Arrays gradients;
    for (int i : argnums) {
      const auto at = static_cast<size_t>(i);
      gradients.push_back(at < count_ ? cotangents[at] : mx::zeros_like(primals[at], stream()));
    }
    return gradients;
  }

  Arrays jvp(const Arrays& primals,
             const Arrays& tangents,
             const std::vector<int>& argnums) override {
    const Tangents split(primals, tangents, argnums, count_, stream());
    return ordered(split.own, split.after, stream());
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) override {
    const auto [own, before] = split_at(inputs, count_);
    return {ordered(own, before, stream()),
            {axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(count_)}};
  }

 private:
  void eval(const Arrays& inputs, Arrays& outputs) const {
    for (size_t i = 0; i < count_; ++i) {
      outputs[i].copy_shared_buffer(inputs[i]);
    }
  }

  const size_t count_;
};

// Not a FusedPrimitive: it is no computation that MLX's ops could express, and no Metal kernel.
class Exchange : public mx::Primitive {
 public:
  Exchange(mx::Stream stream, const Group& group, int step, mx::Stream computes, size_t count)
      : mx::Primitive(stream), group_(group), step_(step), computes_(computes), count_(count) {}

  const char* name() const override { return "MlxAnvilExchange"; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override { eval(inputs, outputs); }
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override { eval(inputs, outputs); }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const Exchange&>(other);
    return group_.raw_group() == that.group_.raw_group() && step_ == that.step_ &&
           computes_ == that.computes_ && count_ == that.count_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return shapes_of_first(inputs, count_);
  }

  // What waited for these arrays forward is waited for backward.
  Arrays vjp(const Arrays& primals,
             const Arrays& cotangents,
             const std::vector<int>& argnums,
             const Arrays&) override {
    const Arrays back = exchange_with_neighbours(cotangents, {}, group_, -step_, computes_);
    Arrays gradients;
    for (int i : argnums) {
      const auto at = static_cast<size_t>(i);
      gradients.push_back(
          at < count_ ? back[at]
                      : ordered({mx::zeros_like(primals[at], stream())}, back, stream())[0]);
    }
    return gradients;
  }

  Arrays jvp(const Arrays& primals,
             const Arrays& tangents,
             const std::vector<int>& argnums) override {
    const Tangents split(primals, tangents, argnums, count_, stream());
    return exchange_with_neighbours(split.own, split.after, group_, step_, computes_);
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) override {
    const int length = vmap_length(inputs, axes);
    Arrays own;
    for (size_t i = 0; i < count_; ++i) {
      own.push_back(repeated_over_vmap(inputs[i], axes[i], 0, length, stream()));
    }
    const Arrays after = split_at(inputs, count_).second;
    return {exchange_with_neighbours(own, after, group_, step_, computes_),
            std::vector<int>(count_, 0)};
  }

 private:
  void eval(const Arrays& inputs, Arrays& outputs) {
    if (inputs.size() > count_) {
      mx::synchronize(computes_);
    }
    const int right = right_of(group_), left = left_of(group_);
    for (size_t i = 0; i < count_; ++i) {
      outputs[i].set_data(allocate(outputs[i].nbytes(), stream()));
      exchange(group_, inputs[i], step_ > 0 ? right : left, outputs[i], step_ > 0 ? left : right,
               stream());
    }
  }

  const Group group_;
  const int step_;
  const mx::Stream computes_;
  const size_t count_;
};

}  // namespace

Arrays exchange_with_neighbours(
    const Arrays& arrays, const Arrays& after, const Group& group, int step, mx::Stream computes) {
  const mx::Stream stream = communication_stream(group);
  std::vector<mx::Shape> shapes = shapes_of_first(arrays, arrays.size());
  std::vector<mx::Dtype> dtypes;
  Arrays inputs;
  for (const mx::array& x : arrays) {
    dtypes.push_back(x.dtype());
    inputs.push_back(mx::contiguous(x, false, stream));
  }
  inputs.insert(inputs.end(), after.begin(), after.end());
  auto primitive = std::make_shared<Exchange>(stream, group, step, computes, arrays.size());
  return mx::array::make_arrays(shapes, dtypes, std::move(primitive), inputs);
}

Arrays ordered(const Arrays& arrays, const Arrays& before, mx::Stream stream) {
  std::vector<mx::Shape> shapes = shapes_of_first(arrays, arrays.size());
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& x : arrays) {
    dtypes.push_back(x.dtype());
  }
  Arrays inputs = arrays;
  inputs.insert(inputs.end(), before.begin(), before.end());
  auto primitive = std::make_shared<Ordered>(stream, arrays.size());
  return mx::array::make_arrays(std::move(shapes), dtypes, std::move(primitive), inputs);
}

}  // namespace mlx_anvil

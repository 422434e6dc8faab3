#include "common/broadcast.h"

#include <algorithm>
#include <utility>

#include "common/allocate.h"
#include "common/block.h"
#include "common/checks.h"
#include "common/plan.h"
#include "common/run_on_cpu.h"
#include "common/sum_rows.h"

namespace mlx_anvil {

namespace {

constexpr const char* kOp = "broadcast";

// Moves vmap's axis to the front and pads the rank to that of the result.
mx::array with_batch(const mx::array& x, int axis, size_t rank, mx::Stream s) {
  const mx::array front = mx::moveaxis(x, axis, 0, s);
  mx::Shape shape(rank + 1, 1);
  shape[0] = front.shape(0);
  std::copy(front.shape().begin() + 1, front.shape().end(),
            shape.end() - static_cast<int64_t>(front.ndim() - 1));
  return mx::reshape(front, shape, s);
}

mx::Shape with_batch(const mx::Shape& shape, size_t rank, int batch) {
  mx::Shape all(rank + 1, 1);
  all[0] = batch;
  std::copy(shape.begin(), shape.end(), all.end() - static_cast<int64_t>(shape.size()));
  return all;
}

// ---- sums ---------------------------------------------------------------------------------------

// [outer, rows, inner] -> [outer, inner]
struct Step {
  int64_t outer, rows, inner;
};

// Each step sums one run of adjacent summed axes. The longest run goes first, because it shrinks
// the data most.
std::vector<Step> steps_of(const mx::Shape& shape, const std::vector<int>& axes) {
  struct Run {
    int64_t size;
    bool summed;
  };
  std::vector<Run> runs;
  for (int axis = 0; axis < static_cast<int>(shape.size()); ++axis) {
    if (shape[axis] == 1) {
      continue;
    }
    const bool summed = std::find(axes.begin(), axes.end(), axis) != axes.end();
    if (!runs.empty() && runs.back().summed == summed) {
      runs.back().size *= shape[axis];
    } else {
      runs.push_back({shape[axis], summed});
    }
  }
  const auto product = [](auto begin, auto end) {
    int64_t size = 1;
    for (; begin != end; ++begin) {
      size *= begin->size;
    }
    return size;
  };
  std::vector<Step> steps;
  while (true) {
    auto next = runs.end();
    for (auto run = runs.begin(); run != runs.end(); ++run) {
      if (run->summed && (next == runs.end() || run->size > next->size)) {
        next = run;
      }
    }
    if (next == runs.end()) {
      return steps;
    }
    steps.push_back({product(runs.begin(), next), next->size, product(next + 1, runs.end())});
    *next = {1, false};
  }
}

mx::array sum_axis(const mx::array& x, int axis, mx::Stream s) {
  return mx::sum(x, axis, false, s);
}

// MLX's sum of [outer, rows, inner] in float32, in stages of at most kTerms terms: a single long
// sum would accumulate rounding errors.
mx::array sum_in_stages(mx::array x, mx::Stream s) {
  constexpr int kTerms = 32;
  while (x.shape(1) > kTerms) {
    const int outer = x.shape(0), rows = x.shape(1), inner = x.shape(2);
    const int whole = rows / kTerms * kTerms;
    const auto part = [&](int begin, int end) {
      return mx::slice(x, {0, begin, 0}, {outer, end, inner}, s);
    };
    const mx::array split = mx::reshape(part(0, whole), {outer, whole / kTerms, kTerms, inner}, s);
    const mx::array sums = sum_axis(split, 2, s);
    x = whole == rows ? sums : mx::concatenate({sums, part(whole, rows)}, 1, s);
  }
  return sum_axis(x, 1, s);
}

mx::Shape summed_shape(mx::Shape shape, const std::vector<int>& axes) {
  for (int axis : axes) {
    shape[axis] = 1;
  }
  return shape;
}

mx::array compose_sum(const mx::array& x, const std::vector<int>& axes, mx::Stream s) {
  mx::array sum = is_kernel_dtype(x.dtype()) ? mx::astype(x, mx::float32, s) : x;
  if (composing()) {  // an exported graph may serve any shape, but a reshape fixes one
    return mx::astype(mx::sum(sum, axes, true, s), x.dtype(), s);
  }
  for (const Step& step : steps_of(x.shape(), axes)) {
    const mx::Shape rows = {static_cast<int>(step.outer), static_cast<int>(step.rows),
                            static_cast<int>(step.inner)};
    sum = sum_in_stages(mx::reshape(sum, rows, s), s);
  }
  return mx::astype(mx::reshape(sum, summed_shape(x.shape(), axes), s), x.dtype(), s);
}

mx::array sum_over(const mx::array& x, const std::vector<int>& axes, mx::Stream s);

// Sums over `axes` and keeps them with length 1.
class Sum : public FusedPrimitive {
 public:
  Sum(mx::Stream stream, std::vector<int> axes) : FusedPrimitive(stream), axes_(std::move(axes)) {}

  const char* op() const override { return kOp; }
  const char* kind() const override { return "AnvilSum"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) && axes_ == static_cast<const Sum&>(other).axes_;
  }

  Arrays compose(const Arrays& inputs) override {
    return {compose_sum(inputs[0], axes_, stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {summed_shape(inputs[0].shape(), axes_)};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    allocate_dense(outputs[0], stream());
    if (planning()) {
      return;
    }
    const KernelDtype dtype = kernel_dtype_of(inputs[0]);
    const auto size = static_cast<int64_t>(outputs[0].size());
    const RowSum first{size, 1, 1, inputs[0].data<void>(), outputs[0].data<void>(), dtype, dtype};
    std::vector<Step> steps = steps_of(inputs[0].shape(), axes_);
    if (steps.empty()) {  // all summed axes have length 1
      steps.push_back({size, 1, 1});
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.set_input_array(inputs[0]);
    encoder.set_output_array(outputs[0]);
    encoder.dispatch([first, steps = std::move(steps)] {
      std::vector<float> between, read;
      RowSum sum = first;
      for (size_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[i];
        sum.outer = step.outer;
        sum.rows = step.rows;
        sum.inner = step.inner;
        const bool last = i + 1 == steps.size();
        if (!last) {
          between.resize(static_cast<size_t>(step.outer * step.inner));
        }
        sum.out = last ? first.out : between.data();
        sum.out_dtype = last ? first.out_dtype : KernelDtype::kFloat32;
        sum_rows(sum);
        read.swap(between);
        sum.in = read.data();
        sum.in_dtype = KernelDtype::kFloat32;
      }
    });
  }

  // Sum exists on CPU streams only, so this runs at most in the simulator.
  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    eval_cpu_kernels(inputs, outputs);
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>&,
                  const Arrays&) override {
    return {stretch_arrays({cotangents[0], primals[0]}, stream())[0]};
  }

  Arrays tangent(const Arrays&, const Arrays& tangents, const std::vector<int>&) override {
    return {sum_over(tangents[0], axes_, stream())};
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    std::vector<int> behind_batch = axes_;
    for (int& axis : behind_batch) {
      ++axis;
    }
    const mx::array front = mx::moveaxis(inputs[0], axes[0], 0, stream());
    return {{sum_over(front, behind_batch, stream())}, {0}};
  }

 private:
  const std::vector<int> axes_;
};

mx::array sum_over(const mx::array& x, const std::vector<int>& axes, mx::Stream s) {
  if (s.device == mx::Device::gpu || !is_kernel_dtype(x.dtype())) {
    return compose_sum(x, axes, s);
  }
  return output_of(std::make_shared<Sum>(s, axes), x.dtype(), {x});
}

// ---- broadcasts ---------------------------------------------------------------------------------

class Stretch : public FusedPrimitive {
 public:
  Stretch(mx::Stream stream, mx::Shape shape) : FusedPrimitive(stream), shape_(std::move(shape)) {}

  const char* op() const override { return kOp; }
  const char* kind() const override { return "AnvilStretch"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           shape_ == static_cast<const Stretch&>(other).shape_;
  }

  Arrays compose(const Arrays& inputs) override {
    return {mx::broadcast_to(inputs[0], shape_, stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays&) override { return {shape_}; }

  // The output is a view.
  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    if (outputs[0].size() == 0) {
      allocate_dense(outputs[0], stream());
      return;
    }
    const size_t leading = shape_.size() - x.ndim();
    mx::Strides strides(shape_.size(), 0);
    for (size_t axis = 0; axis < x.ndim(); ++axis) {
      const bool repeats = x.shape()[axis] != shape_[leading + axis];
      strides[leading + axis] = repeats ? 0 : x.strides()[axis];
    }
    mx::array::Flags flags = x.flags();
    const bool repeats = outputs[0].size() > x.size();
    flags.row_contiguous = flags.row_contiguous && !repeats;
    flags.col_contiguous = flags.col_contiguous && !repeats;
    outputs[0].copy_shared_buffer(x, strides, flags, x.data_size());
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    eval_cpu_kernels(inputs, outputs);
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>&,
                  const Arrays&) override {
    return {sum_to(cotangents[0], primals[0].shape(), stream())};
  }

  Arrays tangent(const Arrays&, const Arrays& tangents, const std::vector<int>&) override {
    return {stretch(tangents[0], shape_, stream())};
  }

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const mx::array front = with_batch(inputs[0], axes[0], shape_.size(), stream());
    return {{stretch(front, with_batch(shape_, shape_.size(), front.shape(0)), stream())}, {0}};
  }

 private:
  const mx::Shape shape_;
};

// [groups, rows per group, columns]
mx::Shape by_group(const mx::array& rows, const mx::Shape& vectors) {
  const size_t of_all = size_t(vectors[0]) * size_t(vectors[1]);
  return {vectors[0], static_cast<int>(rows.size() / std::max<size_t>(1, of_all)), vectors[1]};
}

}  // namespace

mx::array stretch(const mx::array& x, const mx::Shape& shape, mx::Stream stream) {
  if (x.shape() == shape) {
    return x;
  }
  if (!is_kernel_dtype(x.dtype())) {
    return mx::broadcast_to(x, shape, stream);
  }
  return output_of(std::make_shared<Stretch>(stream, shape), x.dtype(), {x});
}

mx::array stretch_like(const mx::array& x, const mx::array& other, mx::Stream stream) {
  return stretch_arrays({x, other}, stream)[0];
}

Arrays stretch_arrays(const Arrays& arrays, mx::Stream stream) {
  if (std::all_of(arrays.begin(), arrays.end(),
                  [&](const mx::array& x) { return x.shape() == arrays[0].shape(); })) {
    return arrays;
  }
  if (std::any_of(arrays.begin(), arrays.end(), [](const mx::array& x) { return x.is_tracer(); })) {
    // For shapeless traces, MLX's broadcasts take all arrays as inputs. Ours fix the shape.
    const Arrays by_mlx = mx::broadcast_arrays(arrays, stream);
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (by_mlx[i].id() != arrays[i].id() && by_mlx[i].inputs().size() > 1) {
        return by_mlx;
      }
    }
  }
  mx::Shape shape;
  for (const mx::array& x : arrays) {
    shape = mx::broadcast_shapes(shape, x.shape());
  }
  Arrays stretched;
  stretched.reserve(arrays.size());
  for (const mx::array& x : arrays) {
    stretched.push_back(stretch(x, shape, stream));
  }
  return stretched;
}

mx::array sum_to(const mx::array& x, const mx::Shape& shape, mx::Stream stream) {
  if (x.shape() == shape) {
    return x;
  }
  const int rank = static_cast<int>(x.ndim()), leading = rank - static_cast<int>(shape.size());
  std::vector<int> axes;
  for (int axis = 0; axis < rank; ++axis) {
    if (axis < leading || (shape[axis - leading] == 1 && x.shape(axis) != 1)) {
      axes.push_back(axis);
    }
  }
  const mx::array sum = sum_over(x, axes, stream);
  if (leading == 0) {
    return sum;
  }
  return leading == rank ? mx::squeeze(mx::flatten(sum, stream), 0, stream)
                         : mx::flatten(sum, 0, leading, stream);
}

mx::array stretch_to_rows(const mx::array& vector, const mx::array& rows, mx::Stream stream) {
  if (vector.ndim() == 1) {
    return stretch_like(vector, rows, stream);
  }
  const mx::Shape shape = by_group(rows, vector.shape());
  const mx::array of_group = mx::reshape(vector, {shape[0], 1, shape[2]}, stream);
  return mx::reshape(stretch(of_group, shape, stream), rows.shape(), stream);
}

mx::array sum_rows_to(const mx::array& rows, const mx::Shape& shape, mx::Stream stream) {
  if (shape.size() == 1) {
    return sum_to(rows, shape, stream);
  }
  const mx::Shape groups = by_group(rows, shape);
  const mx::array sum =
      sum_to(mx::reshape(rows, groups, stream), {groups[0], 1, groups[2]}, stream);
  return mx::reshape(sum, shape, stream);
}

}  // namespace mlx_anvil

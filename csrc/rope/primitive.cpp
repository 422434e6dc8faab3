#include "rope/primitive.h"

#include <algorithm>
#include <string>

#include "common/allocate.h"
#include "common/cache_size.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/run_on_cpu.h"
#include "common/trace.h"
#include "common/vmap_axis.h"
#include "rope/cpu.h"
#include "rope/gpu.h"

namespace mlx_anvil {

namespace {

// Inputs: one or two tensors, offset, and freqs if given.
class Rope : public FusedPrimitive {
 public:
  Rope(mx::Stream stream, const RopeConfig& config, size_t tensors)
      : FusedPrimitive(stream), config_(config), tensors_(tensors) {}

  const char* op() const override { return tensors_ == 1 ? "rope" : "rope_qk"; }
  const char* kind() const override { return tensors_ == 1 ? "Rope" : "RopeQK"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return FusedPrimitive::is_equivalent(other) &&
           config_ == static_cast<const Rope&>(other).config_;
  }

  Arrays compose(const Arrays& inputs) override {
    return compose_rope(config_, tensors_of(inputs), positions_of(inputs), stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (const mx::array& x : tensors_of(inputs)) {
      shapes.push_back(x.shape());
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override;

 protected:
  bool wants_dense(size_t input) const override { return input >= tensors_; }

  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override;
  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override;
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override;

 private:
  Arrays tensors_of(const Arrays& inputs) const {
    return {inputs.begin(), inputs.begin() + static_cast<int64_t>(tensors_)};
  }

  RopePositions positions_of(const Arrays& inputs) const {
    return RopePositions::of(inputs, tensors_);
  }

  bool is_tensor(int argument) const { return argument < static_cast<int>(tensors_); }

  void require_differentiable(const std::vector<int>& argnums) const {
    if (std::count(argnums.begin(), argnums.end(), static_cast<int>(tensors_)) > 0) {
      throw_value_error(op(), "offset has no gradient, because it counts positions.");
    }
  }

  // Rotates `values` with the positions of `inputs`, in one kernel.
  Arrays rotate(const RopeConfig& config, const Arrays& values, const Arrays& inputs) {
    return apply_rope(config, values, positions_of(inputs), stream());
  }

  // Reuses an input's memory if it is donatable: each pair is read before it is written. Returns
  // true if any output does so.
  bool allocate_outputs(const Arrays& inputs, Arrays& outputs);

  const RopeConfig config_;
  const size_t tensors_;
};

bool Rope::allocate_outputs(const Arrays& inputs, Arrays& outputs) {
  bool in_place = false;
  for (size_t i = 0; i < outputs.size(); ++i) {
    in_place = !allocate_or_reuse(outputs[i], {&inputs[i]}, stream()) || in_place;
  }
  return in_place;
}

void Rope::eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) {
  const bool in_place = allocate_outputs(inputs, outputs);
  RopeArgs args = cpu_args(config_, positions_of(inputs), outputs[0]);
  args.count = static_cast<int>(tensors_);
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors_; ++i) {
    RopeTensor& tensor = args.tensors[i];
    tensor = {
        inputs[i].data<void>(), outputs[i].data<void>(), outputs[i].shape(1), {}, args.length};
    std::copy_n(inputs[i].strides().begin(), 4, tensor.strides);
    bytes += 2 * static_cast<int64_t>(outputs[i].nbytes());
  }
  args.stream = !in_place && streams_outputs(bytes);
  run_on_cpu(
      *this, inputs, outputs, [args] { rope_cpu(args); },
      [&] { return std::string(op()) + "_" + to_text(args.dtype); });
}

void Rope::eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) {
  allocate_outputs(inputs, outputs);
  rope_gpu(config_, tensors_of(inputs), positions_of(inputs), outputs, stream());
}

// The gradient of a tensor is the inverse rotation, launched only for the tensors in `argnums`. The
// gradient of freqs is a graph of MLX ops.
Arrays Rope::gradient(const Arrays& primals,
                      const Arrays& cotangents,
                      const std::vector<int>& argnums,
                      const Arrays& outputs) {
  require_differentiable(argnums);
  Arrays wanted;
  for (int i : argnums) {
    if (is_tensor(i)) {
      wanted.push_back(cotangents[i]);
    }
  }
  RopeConfig inverse = config_;
  inverse.inverse = !config_.inverse;
  const Arrays rotated = wanted.empty() ? Arrays{} : rotate(inverse, wanted, primals);
  Arrays gradients;
  size_t next = 0;
  for (int i : argnums) {
    gradients.push_back(is_tensor(i)
                            ? rotated[next++]
                            : FusedPrimitive::gradient(primals, cotangents, {i}, outputs)[0]);
  }
  return gradients;
}

Arrays Rope::tangent(const Arrays& primals,
                     const Arrays& tangents,
                     const std::vector<int>& argnums) {
  require_differentiable(argnums);
  const mx::Stream s = stream();
  Arrays moved, outputs;
  for (size_t i = 0; i < tensors_; ++i) {
    outputs.push_back(mx::zeros_like(primals[i], s));
  }
  std::vector<int> places;
  for (size_t n = 0; n < argnums.size(); ++n) {
    if (is_tensor(argnums[n])) {
      moved.push_back(tangents[n]);
      places.push_back(argnums[n]);
    }
  }
  const Arrays rotated = moved.empty() ? Arrays{} : rotate(config_, moved, primals);
  for (size_t n = 0; n < places.size(); ++n) {
    outputs[places[n]] = rotated[n];
  }
  for (size_t n = 0; n < argnums.size(); ++n) {
    if (!is_tensor(argnums[n])) {
      const Arrays through_freqs = FusedPrimitive::tangent(primals, {tangents[n]}, {argnums[n]});
      for (size_t i = 0; i < tensors_; ++i) {
        outputs[i] = mx::add(outputs[i], through_freqs[i], s);
      }
    }
  }
  return outputs;
}

// Folds vmap's axis into the batch if each element has its own offsets, otherwise into the heads.
std::pair<Arrays, std::vector<int>> Rope::batched(const Arrays& inputs,
                                                  const std::vector<int>& axes) {
  const mx::Stream s = stream();
  if (inputs.size() > tensors_ + 1 && axes[tensors_ + 1] >= 0) {
    return FusedPrimitive::batched(inputs, axes);
  }
  const int count = vmap_length(inputs, axes);
  RopePositions positions = positions_of(inputs);
  const bool own_offsets = axes[tensors_] >= 0;
  const int to = own_offsets ? 0 : 1;  // the axis that vmap's is folded into
  Arrays merged;
  for (size_t i = 0; i < tensors_; ++i) {
    const mx::array x = repeated_over_vmap(inputs[i], axes[i], to, count, s);
    merged.push_back(mx::flatten(x, to, to + 1, s));
  }
  if (own_offsets) {
    const mx::array offset = mx::moveaxis(positions.offset, axes[tensors_], 0, s);
    const mx::array columns = mx::reshape(offset, {count, -1}, s);
    const int batch = merged[0].shape(0) / count;
    positions.offset = mx::flatten(mx::broadcast_to(columns, {count, batch}, s), s);
  }
  Arrays outputs = apply_rope(config_, merged, positions, s);
  for (mx::array& out : outputs) {
    out = mx::unflatten(out, to, {count, out.shape(to) / count}, s);
  }
  return {outputs, std::vector<int>(tensors_, to)};
}

}  // namespace

Arrays apply_rope(const RopeConfig& config, Arrays tensors, RopePositions positions, mx::Stream s) {
  std::string why_not;
  if (s.device == mx::Device::gpu && !can_launch(s.device, &why_not)) {
    note_fallback(tensors.size() == 1 ? "rope" : "rope_qk", why_not);
    return compose_rope(config, tensors, positions, s);
  }
  const std::vector<mx::Dtype> dtypes(tensors.size(), tensors[0].dtype());
  Arrays inputs = std::move(tensors);
  inputs.push_back(std::move(positions.offset));
  if (positions.freqs) {
    inputs.push_back(*std::move(positions.freqs));
  }
  return outputs_of(std::make_shared<Rope>(s, config, dtypes.size()), dtypes, std::move(inputs));
}

}  // namespace mlx_anvil

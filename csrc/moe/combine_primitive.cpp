// The primitives of moe_combine: the weighted sum, and its gradients.
#include <algorithm>
#include <string>

#include "common/allocate.h"
#include "common/cache_size.h"
#include "common/checks.h"
#include "common/run_on_cpu.h"
#include "common/trace.h"
#include "common/vmap_axis.h"
#include "moe/compose.h"
#include "moe/cpu.h"
#include "moe/gpu.h"
#include "moe/primitive.h"

namespace mlx_anvil {

namespace {

// Arrays of a call, by their roles.
MoeTerms terms_of(const MoeCombineArrays& arrays) {
  return {arrays.weights.has_value(), arrays.residual.has_value(), arrays.shared.has_value(),
          arrays.shared_gate.has_value()};
}

void append_terms(Arrays& inputs, const MoeCombineArrays& arrays) {
  for (const auto* x : {&arrays.weights, &arrays.residual, &arrays.shared, &arrays.shared_gate}) {
    if (*x) {
      inputs.push_back(**x);
    }
  }
}

int64_t bytes_of(const Arrays& arrays) {
  int64_t bytes = 0;
  for (const mx::array& x : arrays) {
    bytes += static_cast<int64_t>(x.nbytes());
  }
  return bytes;
}

class CombinePrimitive : public FusedPrimitive {
 public:
  CombinePrimitive(mx::Stream stream, const MoeTerms& terms, int batch_axes)
      : FusedPrimitive(stream), terms_(terms), batch_axes_(batch_axes) {}

  const char* op() const override { return kMoeCombine; }

  bool is_equivalent(const mx::Primitive& other) const override {
    if (!FusedPrimitive::is_equivalent(other)) {
      return false;
    }
    const auto& own = static_cast<const CombinePrimitive&>(other);
    return terms_ == own.terms_ && batch_axes_ == own.batch_axes_;
  }

 protected:
  bool wants_dense(size_t) const override { return true; }

  // y and inverse are inputs `first` and `first + 1`, then come the terms.
  MoeCombineArrays arrays_of(const Arrays& inputs, size_t first) const {
    MoeCombineArrays arrays{inputs[first], inputs[first + 1]};
    size_t next = first + 2;
    const auto take = [&](bool has, std::optional<mx::array>& x) {
      if (has) {
        x = inputs[next++];
      }
    };
    take(terms_.weights, arrays.weights);
    take(terms_.residual, arrays.residual);
    take(terms_.shared, arrays.shared);
    take(terms_.gate, arrays.shared_gate);
    return arrays;
  }

  MoeSizes sizes_of(const mx::array& y, const mx::array& inverse) const {
    return moe_sizes(inverse, batch_axes_, y.shape(-1));
  }

  static MoeFactors factors_of(const std::optional<mx::array>& x) {
    return x ? MoeFactors{x->data<void>(), x->dtype() == mx::float32} : MoeFactors{};
  }

  static const void* data_of(const std::optional<mx::array>& x) {
    return x ? x->data<void>() : nullptr;
  }

  const MoeTerms terms_;
  const int batch_axes_;
};

// ---- gradients ----------------------------------------------------------------------------------

// Inputs: d_out, y, inverse[, weights][, shared, shared_gate]. Outputs: d_y[, d_weights][,
// d_shared, d_gate]. It has weights, a gate, or both.
class MoeCombineBackward : public CombinePrimitive {
 public:
  using CombinePrimitive::CombinePrimitive;

  const char* kind() const override { return "MoeCombineBackward"; }

  Arrays compose(const Arrays& inputs) override {
    return compose_moe_backward(inputs[0], arrays_of(inputs, 1), batch_axes_, stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes = {inputs[1].shape()};
    for (size_t i = 3; i < inputs.size(); ++i) {
      shapes.push_back(inputs[i].shape());
    }
    return shapes;
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const MoeCombineArrays arrays = arrays_of(inputs, 1);
    allocate_dense(outputs, stream());
    MoeBackwardArgs args{};
    args.sizes = sizes_of(arrays.y, arrays.inverse);
    args.d_out = inputs[0].data<void>();
    args.y = arrays.y.data<void>();
    args.inverse = arrays.inverse.data<int32_t>();
    args.weights = factors_of(arrays.weights);
    args.shared = data_of(arrays.shared);
    args.gate = factors_of(arrays.shared_gate);
    args.d_y = outputs[0].data<void>();
    args.d_weights = terms_.weights ? outputs[1].data<void>() : nullptr;
    if (terms_.gate) {
      args.d_shared = outputs[outputs.size() - 2].data<void>();
      args.d_gate = outputs.back().data<void>();
    }
    args.stream_outputs = streams_outputs(bytes_of(inputs) + bytes_of(outputs));
    const KernelDtype dtype = kernel_dtype_of(arrays.y);
    run_on_cpu(
        *this, inputs, outputs, [dtype, args] { moe_backward_cpu(dtype, args); },
        [&] { return "moe_backward_" + to_text(arrays.y.dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const MoeCombineArrays arrays = arrays_of(inputs, 1);
    allocate_dense(outputs, stream());
    moe_backward_gpu(sizes_of(arrays.y, arrays.inverse), inputs[0], arrays, outputs, stream());
  }

 protected:
  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override;
};

// Returns the primitive's outputs. Those without pairs and tokens are all empty or zero.
Arrays apply_backward(const mx::array& d_out,
                      const MoeCombineArrays& arrays,
                      int batch_axes,
                      mx::Stream s) {
  Arrays inputs = {d_out, arrays.y, arrays.inverse};
  append_terms(inputs, arrays);
  std::vector<mx::Dtype> dtypes = {arrays.y.dtype()};
  for (size_t i = 3; i < inputs.size(); ++i) {
    dtypes.push_back(inputs[i].dtype());
  }
  auto primitive = std::make_shared<MoeCombineBackward>(s, terms_of(arrays), batch_axes);
  std::string why_not;
  if (!has_moe_kernels(moe_sizes(arrays.inverse, batch_axes, arrays.y.shape(-1)), s, &why_not)) {
    note_fallback(kMoeCombine, why_not);
    return primitive->compose(inputs);
  }
  return outputs_of(std::move(primitive), dtypes, std::move(inputs));
}

std::pair<Arrays, std::vector<int>> MoeCombineBackward::batched(const Arrays& inputs,
                                                                const std::vector<int>& axes) {
  const Arrays in = with_vmap_in_front(inputs, axes, stream());
  Arrays outputs = apply_backward(in[0], arrays_of(in, 1), batch_axes_ + 1, stream());
  std::vector<int> out_axes(outputs.size(), 0);
  return {std::move(outputs), std::move(out_axes)};
}

// ---- the sum ------------------------------------------------------------------------------------

// Inputs: y, inverse[, weights][, residual][, shared][, shared_gate].
class MoeCombine : public CombinePrimitive {
 public:
  using CombinePrimitive::CombinePrimitive;

  const char* kind() const override { return "MoeCombine"; }

  Arrays compose(const Arrays& inputs) override {
    return {compose_moe_combine(arrays_of(inputs, 0), batch_axes_, stream())};
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[1].shape();
    shape.back() = inputs[0].shape(-1);
    return {shape};
  }

  void eval_cpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const MoeCombineArrays arrays = arrays_of(inputs, 0);
    allocate_dense(outputs[0], stream());
    MoeCombineArgs args{};
    args.sizes = sizes_of(arrays.y, arrays.inverse);
    args.y = arrays.y.data<void>();
    args.inverse = arrays.inverse.data<int32_t>();
    args.weights = factors_of(arrays.weights);
    args.residual = data_of(arrays.residual);
    args.shared = data_of(arrays.shared);
    args.gate = factors_of(arrays.shared_gate);
    args.out = outputs[0].data<void>();
    args.stream_outputs = streams_outputs(bytes_of(inputs) + bytes_of(outputs));
    const KernelDtype dtype = kernel_dtype_of(arrays.y);
    run_on_cpu(
        *this, inputs, outputs, [dtype, args] { moe_combine_cpu(dtype, args); },
        [&] { return "moe_combine_" + to_text(arrays.y.dtype()); });
  }

  void eval_gpu_kernels(const Arrays& inputs, Arrays& outputs) override {
    const MoeCombineArrays arrays = arrays_of(inputs, 0);
    allocate_dense(outputs[0], stream());
    moe_combine_gpu(sizes_of(arrays.y, arrays.inverse), arrays, outputs[0], stream());
  }

 protected:
  Arrays gradient(const Arrays& primals,
                  const Arrays& cotangents,
                  const std::vector<int>& argnums,
                  const Arrays& outputs) override;
  Arrays tangent(const Arrays& primals,
                 const Arrays& tangents,
                 const std::vector<int>& argnums) override;

  std::pair<Arrays, std::vector<int>> batched(const Arrays& inputs,
                                              const std::vector<int>& axes) override {
    const Arrays in = with_vmap_in_front(inputs, axes, stream());
    return {{apply_moe_combine(arrays_of(in, 0), batch_axes_ + 1, stream())}, {0}};
  }

 private:
  enum class Role { kY, kInverse, kWeights, kResidual, kShared, kGate };

  std::vector<Role> roles() const {
    std::vector<Role> roles = {Role::kY, Role::kInverse};
    const auto add = [&](bool has, Role role) {
      if (has) {
        roles.push_back(role);
      }
    };
    add(terms_.weights, Role::kWeights);
    add(terms_.residual, Role::kResidual);
    add(terms_.shared, Role::kShared);
    add(terms_.gate, Role::kGate);
    return roles;
  }
};

// The cotangent is the gradient of a residual, and of an expert that is added as it is. One kernel
// computes the others.
Arrays MoeCombine::gradient(const Arrays& primals,
                            const Arrays& cotangents,
                            const std::vector<int>& argnums,
                            const Arrays&) {
  const std::vector<Role> own = roles();
  const mx::array& d_out = cotangents[0];
  const bool has_kernel = terms_.weights || terms_.gate;
  const auto is_in_kernel = [&](int i) {
    return own[i] == Role::kY || own[i] == Role::kWeights || own[i] == Role::kGate ||
           (own[i] == Role::kShared && terms_.gate);
  };
  Arrays fused;
  if (has_kernel && std::any_of(argnums.begin(), argnums.end(), is_in_kernel)) {
    MoeCombineArrays arrays = arrays_of(primals, 0);
    arrays.residual.reset();
    if (!terms_.gate) {
      arrays.shared.reset();
    }
    fused = apply_backward(d_out, arrays, batch_axes_, stream());
  }
  Arrays gradients;
  for (int i : argnums) {
    switch (own[i]) {
      case Role::kY:
        gradients.push_back(
            has_kernel ? fused[0] : apply_moe_spread(d_out, primals[1], batch_axes_, stream()));
        break;
      case Role::kInverse:
        gradients.push_back(mx::zeros_like(primals[1], stream()));
        break;
      case Role::kWeights:
        gradients.push_back(fused[1]);
        break;
      case Role::kShared:
        gradients.push_back(terms_.gate ? fused[fused.size() - 2] : d_out);
        break;
      case Role::kGate:
        gradients.push_back(fused.back());
        break;
      case Role::kResidual:
        gradients.push_back(d_out);
        break;
    }
  }
  return gradients;
}

// The op is linear in y, residual and shared, and in the weights. The gate's part is a graph of MLX
// ops.
Arrays MoeCombine::tangent(const Arrays& primals,
                           const Arrays& tangents,
                           const std::vector<int>& argnums) {
  const mx::Stream s = stream();
  const MoeCombineArrays at = arrays_of(primals, 0);
  const std::vector<Role> own = roles();
  std::optional<mx::array> y, weights, residual, shared, gate;
  for (size_t i = 0; i < argnums.size(); ++i) {
    switch (own[argnums[i]]) {
      case Role::kY:
        y = tangents[i];
        break;
      case Role::kWeights:
        weights = tangents[i];
        break;
      case Role::kResidual:
        residual = tangents[i];
        break;
      case Role::kShared:
        shared = tangents[i];
        break;
      case Role::kGate:
        gate = tangents[i];
        break;
      case Role::kInverse:
        break;
    }
  }
  if (gate) {
    const auto wide = [&](const mx::array& x) { return mx::astype(x, mx::float32, s); };
    const mx::array logit = wide(*at.shared_gate);
    const mx::array slope =
        mx::multiply(mx::sigmoid(logit, s), mx::sigmoid(mx::negative(logit, s), s), s);
    const mx::array part = mx::multiply(mx::multiply(slope, wide(*gate), s), wide(*at.shared), s);
    residual = mx::astype(residual ? mx::add(wide(*residual), part, s) : part, at.y.dtype(), s);
  }
  const std::optional<mx::array> own_gate = shared ? at.shared_gate : std::nullopt;
  if (!y && !weights) {  // a sum of no pairs
    mx::Shape shape = at.inverse.shape();
    shape.back() = 0;
    const mx::array none =
        mx::zeros(moe_batch_shape(at.inverse, batch_axes_, {0, at.y.shape(-1)}), at.y.dtype(), s);
    return {apply_moe_combine(
        {none, mx::zeros(shape, mx::int32, s), {}, residual, shared, own_gate}, batch_axes_, s)};
  }
  if (y) {
    const mx::array sum =
        apply_moe_combine({*y, at.inverse, at.weights, residual, shared, own_gate}, batch_axes_, s);
    if (!weights) {
      return {sum};
    }
    return {apply_moe_combine({at.y, at.inverse, weights, sum}, batch_axes_, s)};
  }
  return {
      apply_moe_combine({at.y, at.inverse, weights, residual, shared, own_gate}, batch_axes_, s)};
}

}  // namespace

mx::array apply_moe_combine(MoeCombineArrays arrays, int batch_axes, mx::Stream s) {
  auto primitive = std::make_shared<MoeCombine>(s, terms_of(arrays), batch_axes);
  const mx::Dtype dtype = arrays.y.dtype();
  const MoeSizes sizes = moe_sizes(arrays.inverse, batch_axes, arrays.y.shape(-1));
  Arrays inputs = {std::move(arrays.y), std::move(arrays.inverse)};
  append_terms(inputs, arrays);
  std::string why_not;
  if (!has_moe_kernels(sizes, s, &why_not)) {
    note_fallback(kMoeCombine, why_not);
    return primitive->compose(inputs)[0];
  }
  return output_of(std::move(primitive), dtype, std::move(inputs));
}

}  // namespace mlx_anvil

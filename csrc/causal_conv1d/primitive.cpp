#include "causal_conv1d/primitive.h"

#include "common/vmap_axis.h"

namespace mlx_anvil {

ConvView ConvPrimitive::view(const Arrays& inputs) const {
  const auto at = [&](bool exists, size_t i) { return exists ? &inputs[i] : nullptr; };
  return {&inputs[0], &inputs[1], at(config_.has_bias, 2), at(config_.has_state, state_at()),
          at(config_.has_lengths, lengths_at())};
}

ConvProblem ConvPrimitive::problem_of(const Arrays& inputs) const {
  const ConvView in = view(inputs);
  ConvProblem problem{};
  problem.dtype = kernel_dtype_of(*in.x);
  problem.width = in.width();
  problem.silu = config_.silu;
  problem.batch = in.x->shape(0);
  problem.length = in.x->shape(1);
  problem.channels = in.x->shape(2);
  problem.groups = in.groups();
  problem.x = rows_of(*in.x);
  problem.state = in.state ? rows_of(*in.state) : ConvRows{};
  problem.weight = in.weight->data<void>();
  problem.bias = in.bias ? in.bias->data<void>() : nullptr;
  problem.lengths = in.lengths ? in.lengths->data<int32_t>() : nullptr;
  return problem;
}

Arrays ConvPrimitive::fold(const Arrays& inputs, const std::vector<int>& axes, bool may_share) {
  const int batch = vmap_length(inputs, axes);
  bool share = may_share;
  for (size_t i = 1; i < state_at(); ++i) {
    share = share && axes[i] < 0 && inputs[i].ndim() == (i == 1 ? 2 : 1);
  }
  Arrays folded;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (is_vector(i) && share) {
      folded.push_back(inputs[i]);
      continue;
    }
    const mx::array repeated = repeated_over_vmap(inputs[i], axes[i], 0, batch, stream());
    const bool becomes_group = is_vector(i) && repeated.ndim() == (i == 1 ? 3 : 2);
    folded.push_back(becomes_group ? repeated : mx::flatten(repeated, 0, 1, stream()));
  }
  return folded;
}

}  // namespace mlx_anvil

#include "gated_delta/primitive.h"

#include <algorithm>

#include "common/checks.h"
#include "common/vmap_axis.h"

namespace mlx_anvil {

DeltaSizes sizes_of(const GatedDeltaInputs& in) {
  DeltaSizes sizes;
  sizes.batch = in.q.shape(0);
  sizes.length = in.q.shape(1);
  sizes.key_heads = in.q.shape(2);
  sizes.key_dim = in.q.shape(3);
  sizes.value_heads = in.v.shape(2);
  sizes.value_dim = in.v.shape(3);
  sizes.positions = in.positions ? in.positions->shape(1) : 0;
  sizes.is_per_channel = in.g.ndim() == 4;
  return sizes;
}

DeltaView delta_view_of(const mx::array& x) {
  DeltaView view;
  view.data = x.data<void>();
  std::copy(x.strides().begin(), x.strides().end(), view.strides);
  return view;
}

void fill_arguments(DeltaArgs& args, const GatedDeltaConfig& config, const GatedDeltaInputs& in) {
  args.sizes = sizes_of(in);
  args.dtype = kernel_dtype_of(in.q);
  args.q = delta_view_of(in.q);
  args.k = delta_view_of(in.k);
  args.v = delta_view_of(in.v);
  args.g = delta_view_of(in.g);
  args.beta = delta_view_of(in.beta);
  args.g_is_float32 = in.g.dtype() == mx::float32;
  args.beta_is_float32 = in.beta.dtype() == mx::float32;
  args.skip = in.skip ? delta_view_of(*in.skip) : DeltaView{};
  args.gate = in.gate ? delta_view_of(*in.gate) : DeltaView{};
  args.corrects = config.corrects;
  args.state = in.state ? in.state->data<float>() : nullptr;
  args.lengths = in.lengths ? in.lengths->data<int32_t>() : nullptr;
  if (in.positions) {
    args.positions = in.positions->data<int32_t>();
    args.positions_step = in.positions->shape(0) > 1 ? in.positions->shape(1) : 0;
  }
  args.normalizes = config.normalizes;
  args.eps = config.eps;
  args.q_scale = config.q_scale;
}

GatedDeltaInputs GatedDeltaPrimitive::operands(const Arrays& inputs) const {
  const auto given = [&](bool has, size_t at) {
    return has ? std::optional(inputs[at]) : std::nullopt;
  };
  return {inputs[0],
          inputs[1],
          inputs[2],
          inputs[3],
          inputs[4],
          given(config_.has_state, GatedDeltaConfig::kState),
          given(config_.has_skip, config_.skip_at()),
          given(config_.has_gate, config_.gate_at()),
          given(config_.has_lengths, config_.lengths_at()),
          given(config_.returns_states, config_.positions_at())};
}

bool GatedDeltaPrimitive::takes(size_t i, const mx::array& x) const {
  const bool is_skip = config_.has_skip && i == config_.skip_at();
  const bool has_strides =
      i < GatedDeltaConfig::kState || is_skip || config_.is_gate(i) || i == config_.count();
  const bool has_rows = x.ndim() == 4;  // numbers per step and head are read one by one
  return has_strides && (!has_rows || x.strides(3) == 1);
}

Arrays GatedDeltaPrimitive::fold(const Arrays& inputs, const std::vector<int>& axes) {
  const int length = vmap_length(inputs, axes);
  const int batch = inputs[0].shape(axes[0] == 0 ? 1 : 0);
  Arrays folded;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_positions = config_.returns_states && i == config_.positions_at();
    mx::array x = inputs[i];
    if (is_positions && axes[i] < 0 && x.shape(0) == 1) {
      folded.push_back(x);  // for every row of any batch
      continue;
    }
    x = repeated_over_vmap(x, axes[i], 0, length, stream());
    if (is_positions && x.shape(1) != batch) {
      x = mx::broadcast_to(x, {length, batch, x.shape(2)}, stream());
    }
    folded.push_back(mx::flatten(x, 0, 1, stream()));
  }
  return folded;
}

std::pair<Arrays, std::vector<int>> GatedDeltaPrimitive::unfold(Arrays outputs, int length) {
  const std::vector<int> axes(outputs.size(), 0);
  return {unfolded_from_batch(std::move(outputs), length, stream()), axes};
}

}  // namespace mlx_anvil

#include "norm/primitive.h"

#include "common/vmap_axis.h"

namespace mlx_anvil {

Arrays NormPrimitive::fold(const Arrays& inputs, const std::vector<int>& axes, bool may_share) {
  const int batch = vmap_length(inputs, axes);
  bool share = may_share;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool batched = axes[i] >= 0;
    const size_t own_rank = inputs[i].ndim() - batched;
    share = share && (is_of_rows(i) || (!batched && own_rank == 1));
  }
  Arrays folded;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_of_rows(i) && share) {
      folded.push_back(inputs[i]);
      continue;
    }
    const mx::array repeated = repeated_over_vmap(inputs[i], axes[i], 0, batch, stream());
    const bool has_groups = !is_of_rows(i) && repeated.ndim() == 3;
    folded.push_back(has_groups ? mx::flatten(repeated, 0, 1, stream()) : repeated);
  }
  return folded;
}

}  // namespace mlx_anvil

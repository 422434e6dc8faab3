#include "norm/primitive.h"

#include "common/broadcast.h"

namespace mlx_anvil {

int batch_size(const Arrays& inputs, const std::vector<int>& axes) {
  int size = 1;
  for (size_t i = 0; i < inputs.size(); ++i) {
    size = axes[i] < 0 ? size : inputs[i].shape(axes[i]);
  }
  return size;
}

Arrays NormPrimitive::fold(const Arrays& inputs, const std::vector<int>& axes, bool may_share) {
  const int batch = batch_size(inputs, axes);
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
    const mx::array front = axes[i] < 0 ? mx::expand_dims(inputs[i], 0, stream())
                                        : mx::moveaxis(inputs[i], axes[i], 0, stream());
    mx::Shape shape = front.shape();
    shape[0] = batch;
    const mx::array repeated = stretch(front, shape, stream());
    const bool has_groups = !is_of_rows(i) && repeated.ndim() == 3;
    folded.push_back(has_groups ? mx::flatten(repeated, 0, 1, stream()) : repeated);
  }
  return folded;
}

}  // namespace mlx_anvil

#include "common/vmap_axis.h"

#include <algorithm>

#include "common/broadcast.h"

namespace mlx_anvil {

int vmap_length(const Arrays& inputs, const std::vector<int>& axes) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) {
      return inputs[i].shape(axes[i]);
    }
  }
  return 1;
}

mx::array with_vmap_axis(const mx::array& x, int from, int to, mx::Stream stream) {
  return from < 0 ? mx::expand_dims(x, to, stream) : mx::moveaxis(x, from, to, stream);
}

mx::array repeated_over_vmap(const mx::array& x, int from, int to, int length, mx::Stream stream) {
  const mx::array moved = with_vmap_axis(x, from, to, stream);
  mx::Shape shape = moved.shape();
  shape[to] = length;
  return stretch(moved, shape, stream);
}

Arrays unfolded_from_batch(Arrays outputs, int length, mx::Stream stream) {
  for (mx::array& x : outputs) {
    x = mx::unflatten(x, 0, {length, x.shape(0) / std::max(length, 1)}, stream);
  }
  return outputs;
}

Arrays with_vmap_in_front(const Arrays& inputs, const std::vector<int>& axes, mx::Stream stream) {
  const int length = vmap_length(inputs, axes);
  Arrays front;
  for (size_t i = 0; i < inputs.size(); ++i) {
    front.push_back(repeated_over_vmap(inputs[i], axes[i], 0, length, stream));
  }
  return front;
}

}  // namespace mlx_anvil

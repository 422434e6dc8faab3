#include "common/composing.h"

#include <vector>

#include "common/block.h"

namespace mlx_anvil {

mx::array dense_copy(const mx::array& x, mx::Stream stream) {
  return composing() ? x : mx::contiguous(x, false, stream);
}

mx::array length_of(const mx::array& x, int axis, mx::Stream stream) {
  return composing() ? mx::number_of_elements(x, {axis}, false, mx::int32, stream)
                     : mx::array(x.shape(axis));
}

mx::array indices_of(const mx::array& x, int axis, mx::Stream stream) {
  if (!composing()) {
    return mx::arange(0, x.shape(axis), mx::int32, stream);
  }
  std::vector<int> others;
  for (int other = 0; other < static_cast<int>(x.ndim()); ++other) {
    if (other != axis) {
      others.push_back(other);
    }
  }
  const mx::array ones = mx::astype(mx::ones_like(x, stream), mx::int32, stream);
  const mx::array along = mx::min(ones, others, false, stream);
  return mx::cumsum(along, 0, /*reverse=*/false, /*inclusive=*/false, stream);
}

}  // namespace mlx_anvil

#include "norm/operands.h"

#include "common/allocate.h"
#include "common/composing.h"

namespace mlx_anvil {

Arrays limit_rank(Arrays arrays, mx::Stream stream) {
  constexpr size_t kMaxRank = MLX_ANVIL_NORM_ROW_AXES + 1;
  for (mx::array& x : arrays) {
    if (x.ndim() > kMaxRank) {
      x = dense_copy(x, stream);
    }
  }
  return arrays;
}

NormRowParams norm_rows_of(const mx::array& x) {
  NormRowParams rows{};
  rows.column_stride = x.strides(-1);
  // A single row needs one axis too.
  rows.axes = 1;
  rows.extents[0] = 1;
  bool first = true;
  for (int axis = 0; axis < static_cast<int>(x.ndim()) - 1; ++axis) {
    const auto extent = static_cast<uint32_t>(x.shape(axis));
    const int64_t stride = x.strides(axis);
    if (extent == 1) {
      continue;
    }
    uint32_t& last_extent = rows.extents[rows.axes - 1];
    int64_t& last_stride = rows.strides[rows.axes - 1];
    if (first) {
      last_extent = extent;
      last_stride = stride;
      first = false;
    } else if (last_stride == stride * extent) {
      last_extent *= extent;
      last_stride = stride;
    } else {
      rows.extents[rows.axes] = extent;
      rows.strides[rows.axes++] = stride;
    }
  }
  return rows;
}

}  // namespace mlx_anvil

#include "common/elementwise_layout.h"

#include <algorithm>

#include "common/allocate.h"
#include "common/errors.h"

namespace mlx_anvil {

namespace {

// Dense means without gaps or repeats, but not necessarily row-major.
bool is_dense(const mx::array& x) {
  return x.flags().contiguous && x.data_size() == x.size();
}

// Returns true if all inputs are dense in one common order. The outputs then use that order, and
// nothing is strided.
bool share_dense_order(const Arrays& inputs) {
  return std::all_of(inputs.begin(), inputs.end(), [&](const mx::array& x) {
    return is_dense(x) && x.strides() == inputs[0].strides();
  });
}

// Appends an axis, or merges it into the previous one if the two are contiguous in every input.
void add_axis(ElementwiseLayout& layout, const Arrays& inputs, size_t axis) {
  const int64_t extent = inputs[0].shape()[axis];
  const int previous = layout.rank - 1;
  bool merges = layout.rank > 0;
  for (size_t k = 0; merges && k < inputs.size(); ++k) {
    merges = layout.strides[k][previous] == inputs[k].strides()[axis] * extent;
  }
  const int to = merges ? previous : layout.rank++;
  if (layout.rank > kElementwiseMaxRank) {
    throw_internal_error("elementwise", "rank above " + std::to_string(kElementwiseMaxRank) +
                                            " was not made contiguous.");
  }
  layout.shape[to] = merges ? layout.shape[to] * extent : extent;
  for (size_t k = 0; k < inputs.size(); ++k) {
    layout.strides[k][to] = inputs[k].strides()[axis];
  }
}

ElementwiseLayout dense_layout(const Arrays& inputs) {
  ElementwiseLayout layout;
  layout.flat = true;
  layout.rank = 1;
  layout.shape[0] = layout.size = static_cast<int64_t>(inputs[0].size());
  for (size_t k = 0; k < inputs.size(); ++k) {
    layout.strides[k][0] = 1;
  }
  return layout;
}

ElementwiseLayout strided_layout(const Arrays& inputs) {
  ElementwiseLayout layout;
  layout.size = static_cast<int64_t>(inputs[0].size());
  for (size_t axis = 0; axis < inputs[0].ndim(); ++axis) {
    if (inputs[0].shape()[axis] != 1) {
      add_axis(layout, inputs, axis);
    }
  }
  // Only axes of length 1 may have kept the inputs from being dense.
  const bool flat =
      layout.rank == 0 ||
      (layout.rank == 1 && std::all_of(layout.strides, layout.strides + inputs.size(),
                                       [](const int64_t* strides) { return strides[0] == 1; }));
  return flat ? dense_layout(inputs) : layout;
}

}  // namespace

ElementwiseLayout prepare_elementwise(const Arrays& inputs,
                                      Arrays& outputs,
                                      const mx::Stream& stream) {
  const bool shared_order = share_dense_order(inputs);
  ElementwiseLayout layout =
      shared_order || inputs[0].size() == 0 ? dense_layout(inputs) : strided_layout(inputs);
  std::vector<bool> taken(inputs.size(), false);
  for (mx::array& out : outputs) {
    size_t donor = inputs.size();
    for (size_t k = 0; shared_order && k < inputs.size() && donor == inputs.size(); ++k) {
      const bool fits = inputs[k].itemsize() == out.itemsize() && inputs[k].is_donatable();
      donor = fits && !taken[k] ? k : donor;
    }
    if (donor < inputs.size()) {
      taken[donor] = layout.in_place = true;
      out.copy_shared_buffer(inputs[donor]);
    } else if (shared_order) {
      out.set_data(allocate(out.nbytes(), stream), out.size(), inputs[0].strides(),
                   inputs[0].flags());
    } else {
      out.set_data(allocate(out.nbytes(), stream));
    }
  }
  return layout;
}

}  // namespace mlx_anvil

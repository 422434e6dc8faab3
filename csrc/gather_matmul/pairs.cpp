#include "gather_matmul/pairs.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "common/allocate.h"
#include "common/broadcast.h"
#include "common/evaluate.h"
#include "common/vmap_axis.h"
#include "gather_matmul/sum_pairs.h"

namespace mlx_anvil {

namespace {

mx::array number(int64_t value) {
  return mx::array(static_cast<int>(value), mx::int32);
}

// Adds `step` times the index along the first axis.
mx::array with_offsets(const mx::array& ids, int64_t step, mx::Stream s) {
  mx::Shape shape(ids.ndim(), 1);
  shape[0] = ids.shape(0);
  const mx::array first = mx::multiply(mx::arange(shape[0], mx::int32, s), number(step), s);
  return mx::add(ids, mx::reshape(first, shape, s), s);
}

}  // namespace

mx::array flat_matrices(const mx::array& x, mx::Stream s) {
  return x.ndim() == 2 ? mx::expand_dims(x, 0, s) : x.ndim() == 3 ? x : mx::flatten(x, 0, -3, s);
}

int64_t matrix_count(const mx::array& x) {
  return std::accumulate(x.shape().begin(), x.shape().end() - 2, int64_t{1},
                         std::multiplies<int64_t>());
}

mx::array inner_ids(const mx::array& ids, int64_t count, mx::Stream s) {
  const mx::array id = mx::astype(ids, mx::int32, s);
  const mx::array from_end =
      mx::where(mx::less(id, number(0), s), mx::add(id, number(count), s), id, s);
  return mx::clip(from_end, number(0), number(std::max<int64_t>(count - 1, 0)), s);
}

PairIds inner_pairs(const PairIds& ids, const mx::array& x, const mx::array& w, mx::Stream s) {
  PairIds inner = ids;
  inner.rhs = inner_ids(ids.rhs, matrix_count(w), s);
  if (ids.lhs) {
    inner.lhs = inner_ids(*ids.lhs, matrix_count(x), s);
  }
  return inner;
}

mx::array own_ids(const mx::array& ids, int axis, int64_t count, int length, mx::Stream s) {
  return with_offsets(inner_ids(repeated_over_vmap(ids, axis, 0, length, s), count, s), count, s);
}

mx::array lefts_of_pairs(const mx::array& x, const PairIds& ids, mx::Stream s) {
  return ids.lhs ? mx::take(flat_matrices(x, s), inner_ids(*ids.lhs, matrix_count(x), s), 0, s) : x;
}

mx::array sum_over_pairs(const mx::array& of_pairs,
                         const mx::array& x,
                         const PairIds& ids,
                         mx::Stream s) {
  if (!ids.lhs) {
    return sum_to(of_pairs, x.shape(), s);
  }
  const mx::array sums = apply_sum_pairs(of_pairs, *ids.lhs, static_cast<int>(matrix_count(x)), s);
  return mx::reshape(sums, x.shape(), s);
}

MappedPairs map_pairs(const mx::array& x,
                      int x_axis,
                      const PairIds& ids,
                      int rhs_axis,
                      int lhs_axis,
                      int64_t experts,
                      bool own_experts,
                      int length,
                      mx::Stream s) {
  MappedPairs mapped{x, ids};
  mapped.ids.sorted = false;
  mx::array& rhs = mapped.ids.rhs;
  rhs = own_experts ? own_ids(ids.rhs, rhs_axis, experts, length, s)
                    : repeated_over_vmap(ids.rhs, rhs_axis, 0, length, s);
  std::optional<mx::array>& lhs = mapped.ids.lhs;
  if (ids.lhs) {
    lhs = repeated_over_vmap(*ids.lhs, lhs_axis, 0, length, s);
  }
  if (x_axis >= 0) {
    mapped.x = mx::moveaxis(x, x_axis, 0, s);
    const int64_t lefts = matrix_count(mapped.x) / std::max(1, mapped.x.shape(0));
    if (lhs) {
      lhs = with_offsets(inner_ids(*lhs, lefts, s), lefts, s);
    } else {  // x keeps broadcasting to the pairs
      mx::Shape shape = mapped.x.shape();
      shape.insert(shape.begin() + 1, rhs.ndim() + 2 - shape.size(), 1);
      mapped.x = mx::reshape(mapped.x, shape, s);
    }
  } else if (!lhs && matrix_count(x) != 1) {
    const mx::Shape leading(x.shape().begin(), x.shape().end() - 2);
    const int count = static_cast<int>(matrix_count(x));
    lhs =
        mx::broadcast_to(mx::reshape(mx::arange(count, mx::int32, s), leading, s), rhs.shape(), s);
  }
  return mapped;
}

GatherSizes gather_sizes(const mx::array& x, const mx::array& rhs, int64_t experts) {
  GatherSizes sizes;
  sizes.pairs = static_cast<int64_t>(rhs.size());
  sizes.rows = x.shape(-2);
  sizes.lefts = matrix_count(x);
  sizes.experts = experts;
  return sizes;
}

GatherIds pointers_of(const PairIds& ids) {
  return {ids.lhs ? ids.lhs->data<int32_t>() : nullptr, ids.rhs.data<int32_t>()};
}

bool is_trivial_product(const mx::array& x, mx::array& out, mx::Stream s) {
  if (out.size() == 0) {
    out.set_data(allocate(0, s));
    return true;
  }
  if (x.size() == 0) {  // sums without terms
    set_zeros(out, s);
    return true;
  }
  return false;
}

}  // namespace mlx_anvil

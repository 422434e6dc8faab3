#include "moe/compose.h"

#include <algorithm>

namespace mlx_anvil {

namespace {

// The arrays of one call with all batches in one axis and all tokens in another.
class Flat {
 public:
  Flat(const MoeSizes& sizes, mx::Stream stream)
      : sizes_(sizes),
        s_(stream),
        batches_(static_cast<int>(sizes.batches)),
        tokens_(static_cast<int>(sizes.tokens)),
        chosen_(static_cast<int>(sizes.chosen)),
        pairs_(static_cast<int>(sizes.pairs())),
        columns_(static_cast<int>(sizes.columns)) {}

  mx::array wide(const mx::array& x) const { return mx::astype(x, mx::float32, s_); }
  mx::array reshape(const mx::array& x, mx::Shape shape) const {
    return mx::reshape(x, std::move(shape), s_);
  }

  // [batches, tokens, 1, columns], of the tokens
  mx::array of_tokens(const mx::array& x) const {
    return reshape(wide(x), {batches_, tokens_, 1, columns_});
  }
  // [batches, tokens, k, 1]
  mx::array of_pairs(const mx::array& x) const {
    return reshape(wide(x), {batches_, tokens_, chosen_, 1});
  }
  mx::array gate(const mx::array& x) const { return reshape(wide(x), {batches_, tokens_, 1, 1}); }

  // [batches, tokens, k, columns]: the rows of y at the places of the pairs
  mx::array gathered(const mx::array& y, const mx::array& inverse) const {
    const mx::array rows = reshape(wide(y), {batches_, pairs_, columns_});
    return reshape(taken(rows, places(inverse)), {batches_, tokens_, chosen_, columns_});
  }

  // [batches, pairs, columns]: the rows of [batches, tokens, k, columns] at their places
  mx::array placed(const mx::array& rows, const mx::array& inverse) const {
    return taken(reshape(rows, {batches_, pairs_, columns_}), order(inverse));
  }

  // [batches, pairs, columns]: the token of each place
  mx::array tokens_of_places(const mx::array& x, const mx::array& inverse) const {
    const mx::array token = mx::floor_divide(order(inverse), mx::array(chosen_, mx::uint32), s_);
    return taken(reshape(x, {batches_, tokens_, columns_}), token);
  }

 private:
  mx::array places(const mx::array& inverse) const {
    return mx::clip(reshape(mx::stop_gradient(inverse, s_), {batches_, pairs_}), mx::array(0),
                    mx::array(pairs_ - 1), s_);
  }
  mx::array order(const mx::array& inverse) const { return mx::argsort(places(inverse), -1, s_); }
  mx::array taken(const mx::array& rows, const mx::array& index) const {
    return mx::take_along_axis(rows, mx::expand_dims(index, -1, s_), 1, s_);
  }

  const MoeSizes sizes_;
  const mx::Stream s_;
  const int batches_, tokens_, chosen_, pairs_, columns_;
};

}  // namespace

MoeSizes moe_sizes(const mx::array& inverse, int batch_axes, int64_t columns) {
  MoeSizes sizes{1, 1, inverse.shape(-1), columns};
  for (int axis = 0; axis + 1 < static_cast<int>(inverse.ndim()); ++axis) {
    (axis < batch_axes ? sizes.batches : sizes.tokens) *= inverse.shape(axis);
  }
  return sizes;
}

mx::Shape moe_batch_shape(const mx::array& inverse, int batch_axes, mx::Shape last) {
  mx::Shape shape(inverse.shape().begin(), inverse.shape().begin() + batch_axes);
  shape.insert(shape.end(), last.begin(), last.end());
  return shape;
}

Arrays compose_moe_sort(const mx::array& ids, int64_t experts, int batch_axes, mx::Stream s) {
  const MoeSizes sizes = moe_sizes(ids, batch_axes, 0);
  const int pairs = static_cast<int>(sizes.pairs()), count = static_cast<int>(experts);
  const auto shape = [&](int last) { return moe_batch_shape(ids, batch_axes, {last}); };
  if (ids.size() == 0) {
    return {mx::zeros(shape(count + 1), mx::int32, s), mx::zeros(shape(pairs), mx::int32, s),
            mx::zeros(ids.shape(), mx::int32, s), mx::zeros(shape(pairs), mx::int32, s)};
  }
  const mx::array given =
      mx::astype(mx::reshape(mx::stop_gradient(ids, s), shape(pairs), s), mx::int64, s);
  const mx::array own = mx::array(experts, mx::int64), none = mx::array(0, mx::int64);
  const mx::array from_end = mx::where(mx::less(given, none, s), mx::add(given, own, s), given, s);
  const mx::array expert = mx::clip(from_end, none, mx::array(experts - 1, mx::int64), s);
  // Unique keys, so that the order does not depend on how MLX's sort treats ties.
  const mx::array keys = mx::add(mx::multiply(expert, mx::array(int64_t{pairs}, mx::int64), s),
                                 mx::arange(0, pairs, 1, mx::int64, s), s);
  const mx::array order = mx::argsort(keys, -1, s);
  const mx::array sorted = mx::take_along_axis(expert, order, -1, s);
  const mx::array counts = mx::scatter_add_axis(mx::zeros(shape(count + 1), mx::int32, s),
                                                mx::add(expert, mx::array(1, mx::int64), s),
                                                mx::ones(shape(pairs), mx::int32, s), -1, s);
  const auto narrow = [&](const mx::array& x) { return mx::astype(x, mx::int32, s); };
  return {mx::cumsum(counts, -1, false, true, s), narrow(order),
          narrow(mx::reshape(mx::argsort(order, -1, s), ids.shape(), s)), narrow(sorted)};
}

mx::array compose_moe_spread(const mx::array& x,
                             const mx::array& inverse,
                             int batch_axes,
                             mx::Stream s) {
  const MoeSizes sizes = moe_sizes(inverse, batch_axes, x.shape(-1));
  const mx::Shape shape =
      moe_batch_shape(inverse, batch_axes, {static_cast<int>(sizes.pairs()), x.shape(-1)});
  if (inverse.size() == 0 || x.size() == 0) {
    return mx::zeros(shape, x.dtype(), s);
  }
  return mx::reshape(Flat(sizes, s).tokens_of_places(x, inverse), shape, s);
}

mx::array compose_moe_combine(const MoeCombineArrays& arrays, int batch_axes, mx::Stream s) {
  const mx::array &y = arrays.y, &inverse = arrays.inverse;
  mx::Shape shape = inverse.shape();
  shape.back() = y.shape(-1);
  const MoeSizes sizes = moe_sizes(inverse, batch_axes, y.shape(-1));
  if (sizes.batches * sizes.tokens * sizes.columns == 0) {
    return mx::zeros(shape, y.dtype(), s);
  }
  const Flat flat(sizes, s);
  std::optional<mx::array> sum;
  const auto add = [&](const mx::array& x) { sum = sum ? mx::add(*sum, x, s) : x; };
  if (sizes.chosen > 0) {
    const mx::array rows = flat.gathered(y, inverse);
    add(mx::sum(arrays.weights ? mx::multiply(rows, flat.of_pairs(*arrays.weights), s) : rows, 2,
                true, s));
  }
  if (arrays.residual) {
    add(flat.of_tokens(*arrays.residual));
  }
  if (arrays.shared) {
    const mx::array shared = flat.of_tokens(*arrays.shared);
    add(arrays.shared_gate ? mx::multiply(mx::sigmoid(flat.gate(*arrays.shared_gate), s), shared, s)
                           : shared);
  }
  return sum ? mx::astype(mx::reshape(*sum, shape, s), y.dtype(), s)
             : mx::zeros(shape, y.dtype(), s);
}

Arrays compose_moe_backward(const mx::array& d_out,
                            const MoeCombineArrays& arrays,
                            int batch_axes,
                            mx::Stream s) {
  const mx::array &y = arrays.y, &inverse = arrays.inverse;
  const MoeSizes sizes = moe_sizes(inverse, batch_axes, y.shape(-1));
  const bool has_rows = y.size() > 0, has_tokens = d_out.size() > 0;
  const Flat flat(sizes, s);
  Arrays gradients;
  const auto like = [&](const mx::array& x, const mx::array& gradient) {
    gradients.push_back(mx::astype(mx::reshape(gradient, x.shape(), s), x.dtype(), s));
  };
  const auto none = [&](const mx::array& x) { gradients.push_back(mx::zeros_like(x, s)); };
  if (!has_rows) {
    none(y);
  } else if (!arrays.weights) {
    gradients.push_back(compose_moe_spread(d_out, inverse, batch_axes, s));
  } else {
    const mx::array own = mx::multiply(flat.of_pairs(*arrays.weights), flat.of_tokens(d_out), s);
    like(y, flat.placed(own, inverse));
  }
  if (arrays.weights && !has_rows) {
    none(*arrays.weights);
  } else if (arrays.weights) {
    like(*arrays.weights,
         mx::sum(mx::multiply(flat.gathered(y, inverse), flat.of_tokens(d_out), s), -1, true, s));
  }
  if (arrays.shared_gate && !has_tokens) {
    none(*arrays.shared);
    none(*arrays.shared_gate);
  } else if (arrays.shared_gate) {
    const mx::array gate = flat.gate(*arrays.shared_gate), d = flat.of_tokens(d_out);
    const mx::array share = mx::sigmoid(gate, s), rest = mx::sigmoid(mx::negative(gate, s), s);
    like(*arrays.shared, mx::multiply(share, d, s));
    const mx::array dot = mx::sum(mx::multiply(flat.of_tokens(*arrays.shared), d, s), -1, true, s);
    like(*arrays.shared_gate, mx::multiply(dot, mx::multiply(share, rest, s), s));
  }
  return gradients;
}

}  // namespace mlx_anvil

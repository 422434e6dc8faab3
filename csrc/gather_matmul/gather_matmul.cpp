#include "gather_matmul/gather_matmul.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/broadcast.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/shapeless.h"
#include "gather_matmul/pairs.h"
#include "gather_matmul/primitive.h"
#include "quantized_matmul/quantized_matmul.h"

namespace mlx_anvil {

namespace {

using OptionalIds = std::optional<mx::array>;

mx::Shape leading(const mx::array& x) {
  return {x.shape().begin(), x.shape().end() - 2};
}

// ---- ids ----------------------------------------------------------------------------------------

mx::array stretched(const mx::array& ids, const mx::Shape& shape, mx::Stream s) {
  return ids.shape() == shape ? ids : mx::broadcast_to(ids, shape, s);
}

// True if equal runs of the pairs share an element of `shape`, which broadcasts to theirs.
bool is_prefix(const mx::Shape& shape, const mx::Shape& pairs) {
  const size_t first = pairs.size() - shape.size();
  size_t last = shape.size();
  while (last > 0 && shape[last - 1] == 1) {
    --last;
  }
  for (size_t i = 0; i < first && last > 0; ++i) {
    if (pairs[i] != 1) {
      return false;
    }
  }
  return std::equal(shape.begin(), shape.begin() + last, pairs.begin() + first);
}

mx::array every_index(const mx::Shape& shape, int64_t count, mx::Stream s) {
  return mx::reshape(mx::arange(static_cast<int>(count), mx::int32, s), shape, s);
}

// Resolves the ids of a call. x and w have rank 2 or more. Without ids, those of x count its
// matrices, and those of w likewise.
struct Given {
  const char* op;
  const char* x_name;
  const char* w_name;
  const mx::array& x;
  const mx::array& w;
  const OptionalIds& lhs;
  const OptionalIds& rhs;

  void check(mx::Stream s) const {
    for (const auto& [name, ids, of_name, of] : {std::tuple("lhs_indices", &lhs, x_name, &x),
                                                 std::tuple("rhs_indices", &rhs, w_name, &w)}) {
      if (!*ids) {
        continue;
      }
      const int64_t count = matrix_count(*of);
      if (count == 0 && (*ids)->size() > 0) {
        throw_value_error(op, shape_text(of_name, *of) + " and " + shape_text(name, **ids) +
                                  "; allowed: at least one matrix.");
      }
      require_ids(op, **ids, count, {name, " for ", " matrices"}, s);
    }
  }

  PairIds pairs(bool sorted, mx::Stream s) const {
    const mx::Shape of_x = lhs ? lhs->shape() : leading(x);
    const mx::Shape of_w = rhs ? rhs->shape() : leading(w);
    mx::Shape shape;
    try {
      shape = mx::broadcast_shapes(of_x, of_w);
    } catch (const std::invalid_argument&) {
      throw_value_error(op, (lhs ? shape_text("lhs_indices", *lhs) : shape_text(x_name, x)) +
                                " and " +
                                (rhs ? shape_text("rhs_indices", *rhs) : shape_text(w_name, w)) +
                                "; allowed: ids that broadcast; without ids, the leading "
                                "dimensions of the matrices take their place.");
    }
    const mx::array experts = rhs ? ids_in_32_bits(*rhs, s) : every_index(of_w, matrix_count(w), s);
    PairIds ids{stretched(experts, shape, s)};
    ids.sorted = sorted && rhs && !lhs;
    if (lhs) {
      ids.lhs = stretched(ids_in_32_bits(*lhs, s), shape, s);
    } else if (!is_prefix(of_x, shape)) {
      ids.lhs = stretched(every_index(of_x, matrix_count(x), s), shape, s);
    }
    return ids;
  }
};

void require_rank(const char* op, const char* name, const mx::array& x, int rank) {
  if (static_cast<int>(x.ndim()) < rank) {
    throw_value_error(
        op, shape_text(name, x) + "; allowed: rank " + std::to_string(rank) + " or more.");
  }
}

void append(Arrays& inputs, const OptionalIds& lhs, const OptionalIds& rhs) {
  OptionalInputs::append(inputs, lhs);
  OptionalInputs::append(inputs, rhs);
}

}  // namespace

mx::array gather_quantized_matmul(const mx::array& x,
                                  QuantizedMatrix matrix,
                                  const OptionalIds& lhs_indices,
                                  const OptionalIds& rhs_indices,
                                  bool transpose,
                                  const QuantizedOptions& options,
                                  bool sorted_indices,
                                  mx::StreamOrDevice stream) {
  constexpr const char* op = kGatherQuantizedMatmul;
  if (!lhs_indices && !rhs_indices) {
    return quantized_matmul(x, std::move(matrix), transpose, options, stream);
  }
  require_kernel_dtypes(op, {{"x", x}});
  const QuantizedFormat format = checked_format(op, options);
  check_matrix(op, "", format, matrix, transpose ? columns_of(x) : std::nullopt);
  require_rank(op, "x", x, 2);
  check_x(op, x, "w", matrix, transpose ? columns_of(format, matrix) : matrix.w.shape(-2),
          /*over_columns=*/transpose);
  const mx::Stream s = require_stream(op, stream);
  const Given given{op, "x", "w", x, matrix.w, lhs_indices, rhs_indices};
  given.check(s);
  const auto pointer = [](const OptionalIds& ids) { return ids ? &*ids : nullptr; };
  if (traces_shapeless({&x, &matrix.w, &matrix.scales, pointer(matrix.biases), pointer(lhs_indices),
                        pointer(rhs_indices)})) {
    Arrays inputs = {x, matrix.w, matrix.scales};
    OptionalInputs::append(inputs, matrix.biases);
    append(inputs, lhs_indices, rhs_indices);
    const auto call = [=](const Arrays& in) -> Arrays {
      QuantizedMatrix own = {in[1], in[2], matrix.biases};
      OptionalIds lhs = lhs_indices, rhs = rhs_indices;
      OptionalInputs next(in, 3);
      next.replace(own.biases);
      next.replace(lhs);
      next.replace(rhs);
      return {gather_quantized_matmul(in[0], own, lhs, rhs, transpose, options, sorted_indices, s)};
    };
    return shapeless_node(op, s, std::move(inputs), call)[0];
  }
  const PairIds ids = given.pairs(sorted_indices, s);
  const auto product = transpose ? QuantizedProduct::kTransposed : QuantizedProduct::kPlain;
  const mx::Dtype dtype = result_dtype(x, {&matrix});
  convert_for_product(matrix, dtype, s);
  return apply_gather_quantized_matmul(op, format, product, mx::astype(x, dtype, s),
                                       std::move(matrix), ids, s);
}

mx::array gather_matmul(const mx::array& a,
                        const mx::array& b,
                        const OptionalIds& lhs_indices,
                        const OptionalIds& rhs_indices,
                        bool sorted_indices,
                        mx::StreamOrDevice stream) {
  constexpr const char* op = kGatherMatmul;
  require_kernel_dtypes(op, {{"a", a}, {"b", b}});
  require_rank(op, "a", a, 1);
  require_rank(op, "b", b, 1);
  const mx::Stream s = require_stream(op, stream);
  if (a.shape(-1) != b.shape(b.ndim() == 1 ? 0 : -2)) {
    throw_value_error(op, shape_text("a", a) + " and " + shape_text("b", b) +
                              "; allowed: a [..., M, K] and b [..., K, N].");
  }
  const auto pointer = [](const OptionalIds& ids) { return ids ? &*ids : nullptr; };
  if (traces_shapeless({&a, &b, pointer(lhs_indices), pointer(rhs_indices)})) {
    Arrays inputs = {a, b};
    append(inputs, lhs_indices, rhs_indices);
    const auto call = [=](const Arrays& in) -> Arrays {
      OptionalIds lhs = lhs_indices, rhs = rhs_indices;
      OptionalInputs next(in, 2);
      next.replace(lhs);
      next.replace(rhs);
      return {gather_matmul(in[0], in[1], lhs, rhs, sorted_indices, s)};
    };
    return shapeless_node(op, s, std::move(inputs), call)[0];
  }
  const mx::Dtype dtype = mx::promote_types(a.dtype(), b.dtype());
  const mx::array x = mx::astype(a.ndim() == 1 ? mx::expand_dims(a, 0, s) : a, dtype, s);
  const mx::array w = mx::astype(b.ndim() == 1 ? mx::expand_dims(b, 1, s) : b, dtype, s);
  const Given given{op, "a", "b", x, w, lhs_indices, rhs_indices};
  given.check(s);
  mx::array out = apply_gather_matmul(x, w, given.pairs(sorted_indices, s), s);
  if (a.ndim() == 1) {
    out = mx::squeeze(out, -2, s);
  }
  return b.ndim() == 1 ? mx::squeeze(out, -1, s) : out;
}

}  // namespace mlx_anvil

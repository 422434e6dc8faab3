// The op functions moe_permute and moe_combine: checks and the graph nodes.
#include "moe/moe.h"

#include <limits>
#include <string>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/shapeless.h"
#include "moe/primitive.h"

namespace mlx_anvil {

namespace {

// ---- moe_permute --------------------------------------------------------------------------------

std::string given(const mx::array& x, const mx::array& ids) {
  return "x has shape " + to_text(x.shape()) + " and ids has shape " + to_text(ids.shape());
}

void check_shapes(const mx::array& x, const mx::array& ids) {
  if (x.ndim() == 0 || ids.ndim() == 0) {
    throw_value_error(kMoePermute, given(x, ids) + "; allowed: one axis or more.");
  }
  mx::Shape of_x = x.shape(), of_ids = ids.shape();
  of_x.pop_back();
  of_ids.pop_back();
  if (of_x != of_ids) {
    throw_value_error(kMoePermute, given(x, ids) +
                                       "; allowed: [..., columns] and [..., k] with equal axes "
                                       "before the last.");
  }
  if (ids.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    throw_value_error(kMoePermute, given(x, ids) + "; allowed: at most 2^31 - 1 ids.");
  }
}

Arrays permute(const mx::array& x, const mx::array& ids, int64_t experts, mx::Stream s) {
  check_shapes(x, ids);
  require_ids(kMoePermute, ids, experts, {"ids", " and num_experts is ", ""}, s);
  return apply_moe_permute(x, ids_in_32_bits(ids, s), experts, 0, s);
}

// ---- moe_combine --------------------------------------------------------------------------------

// The shape of ids, which inverse has, or the weights.
const mx::Shape& pairs_shape(const mx::array& inverse, const MoeCombineTerms& terms) {
  return terms.weights ? terms.weights->shape() : inverse.shape();
}

void check_pairs(const mx::array& y, const mx::array& inverse, const MoeCombineTerms& terms) {
  if (y.ndim() != 2) {
    throw_value_error(kMoeCombine, shape_text("y", y) + "; allowed: rank 2, [pairs, columns].");
  }
  const char* const name = terms.weights ? "weights" : "inverse";
  const mx::array& pairs = terms.weights ? *terms.weights : inverse;
  if (pairs.ndim() == 0) {
    throw_value_error(kMoeCombine, shape_text(name, pairs) + "; allowed: [..., k].");
  }
  if (pairs.size() != static_cast<size_t>(y.shape(0))) {
    throw_value_error(kMoeCombine, shape_text("y", y) + " and " + shape_text(name, pairs) +
                                       "; allowed: as many rows of y as " + name + ".");
  }
  if (inverse.shape() != pairs.shape() && inverse.shape() != mx::Shape{y.shape(0)}) {
    throw_value_error(kMoeCombine, shape_text("inverse", inverse) + " and " +
                                       shape_text("weights", pairs) +
                                       "; allowed: the shape of weights, or (pairs,).");
  }
}

void check_terms(const mx::array& y, const mx::array& inverse, const MoeCombineTerms& terms) {
  mx::Shape shape = pairs_shape(inverse, terms);
  const auto require = [&](const char* name, const std::optional<mx::array>& x, int last) {
    shape.back() = last;
    if (x && x->shape() != shape) {
      throw_value_error(kMoeCombine, shape_text(name, *x) + "; allowed: " + to_text(shape) + ".");
    }
  };
  require("residual", terms.residual, y.shape(1));
  require("shared", terms.shared, y.shape(1));
  require("shared_gate", terms.shared_gate, 1);
}

mx::array combine(const mx::array& y,
                  const mx::array& inverse,
                  const MoeCombineTerms& terms,
                  mx::Stream s) {
  check_pairs(y, inverse, terms);
  check_terms(y, inverse, terms);
  require_permutation(kMoeCombine, "inverse", inverse, s);
  mx::Dtype dtype = y.dtype();
  for (const auto* x : {&terms.residual, &terms.shared}) {
    dtype = *x ? mx::promote_types(dtype, (*x)->dtype()) : dtype;
  }
  const auto as_rows = [&](const mx::array& x) { return mx::astype(x, dtype, s); };
  // One number for each token or pair: kernels read float32 too.
  const auto as_factor = [&](const mx::array& x) {
    return x.dtype() == dtype ? x : mx::astype(x, mx::float32, s);
  };
  const mx::array places = ids_in_32_bits(inverse, s);
  const mx::Shape& shape = pairs_shape(inverse, terms);
  MoeCombineArrays arrays{as_rows(y), mx::astype(places, mx::int32, s)};
  if (arrays.inverse.shape() != shape) {
    arrays.inverse = mx::reshape(arrays.inverse, shape, s);
  }
  const auto set = [](std::optional<mx::array>& to, const std::optional<mx::array>& x, auto as) {
    if (x) {
      to = as(*x);
    }
  };
  set(arrays.weights, terms.weights, as_factor);
  set(arrays.residual, terms.residual, as_rows);
  set(arrays.shared, terms.shared, as_rows);
  set(arrays.shared_gate, terms.shared_gate, as_factor);
  return apply_moe_combine(std::move(arrays), 0, s);
}

void require_dtypes(const mx::array& y, const MoeCombineTerms& terms) {
  require_kernel_dtypes(kMoeCombine, {{"y", y}});
  const auto require = [](const char* name, const std::optional<mx::array>& x) {
    if (x) {
      require_kernel_dtypes(kMoeCombine, {{name, *x}});
    }
  };
  require("weights", terms.weights);
  require("residual", terms.residual);
  require("shared", terms.shared);
  require("shared_gate", terms.shared_gate);
}

}  // namespace

MoePermuted moe_permute(const mx::array& x,
                        const mx::array& ids,
                        int64_t experts,
                        mx::StreamOrDevice stream) {
  require_kernel_dtypes(kMoePermute, {{"x", x}});
  if (experts < 1 || experts > std::numeric_limits<int32_t>::max() - 1) {
    throw_value_error(kMoePermute, "num_experts is " + std::to_string(experts) +
                                       "; allowed: from 1 to 2^31 - 2.");
  }
  const mx::Stream s = require_stream(kMoePermute, stream);
  const Arrays outputs = traces_shapeless({&x, &ids})
                             ? shapeless_node(kMoePermute, s, {x, ids},
                                              [experts, s](const Arrays& in) {
                                                return permute(in[0], in[1], experts, s);
                                              })
                             : permute(x, ids, experts, s);
  return {outputs[4], outputs[0], outputs[1], outputs[2], outputs[3]};
}

mx::array moe_combine(const mx::array& y,
                      const mx::array& inverse,
                      const MoeCombineTerms& terms,
                      mx::StreamOrDevice stream) {
  require_dtypes(y, terms);
  if (terms.shared_gate && !terms.shared) {
    throw_value_error(kMoeCombine,
                      "shared_gate is given without shared; allowed: both, or shared alone.");
  }
  const mx::Stream s = require_stream(kMoeCombine, stream);
  const auto pointer = [](const std::optional<mx::array>& x) { return x ? &*x : nullptr; };
  if (!traces_shapeless({&y, &inverse, pointer(terms.weights), pointer(terms.residual),
                         pointer(terms.shared), pointer(terms.shared_gate)})) {
    return combine(y, inverse, terms, s);
  }
  Arrays inputs = {y, inverse};
  for (const auto* x : {&terms.weights, &terms.residual, &terms.shared, &terms.shared_gate}) {
    OptionalInputs::append(inputs, *x);
  }
  return shapeless_node(kMoeCombine, s, std::move(inputs), [terms, s](const Arrays& in) -> Arrays {
    MoeCombineTerms own = terms;
    OptionalInputs rest(in, 2);
    for (auto* x : {&own.weights, &own.residual, &own.shared, &own.shared_gate}) {
      rest.replace(*x);
    }
    return {combine(in[0], in[1], own, s)};
  })[0];
}

}  // namespace mlx_anvil

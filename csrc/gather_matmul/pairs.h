// The pairs of a gathered product as arrays: what compositions, derivatives and vmap of all its
// primitives share.
#pragma once

#include <vector>

#include "common/primitive.h"
#include "gather_matmul/primitive.h"

namespace mlx_anvil {

// x [..., M, K] as [lefts, M, K], w likewise.
mx::array flat_matrices(const mx::array& x, mx::Stream s);
int64_t matrix_count(const mx::array& x);

// Ids as int32 within [0, count): see gather_index().
mx::array inner_ids(const mx::array& ids, int64_t count, mx::Stream s);

// The same for the ids of pairs of x and w, as MLX's own products take them.
PairIds inner_pairs(const PairIds& ids, const mx::array& x, const mx::array& w, mx::Stream s);

// Ids of one call in which each of `length` elements of a vmap has its own [0, count): the axis is
// in front.
mx::array own_ids(const mx::array& ids, int axis, int64_t count, int length, mx::Stream s);

// Matrices of x that broadcast to the pairs: [*rhs.shape, M, K], or x itself without `lhs`.
mx::array lefts_of_pairs(const mx::array& x, const PairIds& ids, mx::Stream s);

// The adjoint: sums [*rhs.shape, M, K] over the pairs of each matrix of x, in float32.
mx::array sum_over_pairs(const mx::array& of_pairs,
                         const mx::array& x,
                         const PairIds& ids,
                         mx::Stream s);

// The forward-mode derivative of multiply(a, b) of the first two primals; nullopt if neither moves.
template <class Multiply>
std::optional<mx::array> product_tangent(const Arrays& primals,
                                         const Arrays& tangents,
                                         const std::vector<int>& argnums,
                                         mx::Stream s,
                                         Multiply multiply) {
  std::optional<mx::array> sum;
  for (size_t i = 0; i < argnums.size(); ++i) {
    if (argnums[i] < 2) {
      const mx::array term = multiply(argnums[i] == 0 ? tangents[i] : primals[0],
                                      argnums[i] == 1 ? tangents[i] : primals[1]);
      sum = sum ? mx::add(*sum, term, s) : term;
    }
  }
  return sum;
}

// The last inputs of each primitive: rhs, and lhs if there is one.
inline void append(Arrays& inputs, const PairIds& ids) {
  inputs.push_back(ids.rhs);
  if (ids.lhs) {
    inputs.push_back(*ids.lhs);
  }
}

inline PairIds ids_of(const Arrays& inputs, bool has_lhs, bool sorted) {
  const size_t rhs = inputs.size() - 1 - has_lhs;
  return {inputs[rhs], has_lhs ? std::optional(inputs.back()) : std::nullopt, sorted};
}

// x and the ids of one call that does what a call under vmap does for each of `length` elements.
// The axis becomes the first of the pairs. With `own_experts`, each element has its own matrices: w
// must get the axis in front.
struct MappedPairs {
  mx::array x;
  PairIds ids;
};

MappedPairs map_pairs(const mx::array& x,
                      int x_axis,
                      const PairIds& ids,
                      int rhs_axis,
                      int lhs_axis,
                      int64_t experts,
                      bool own_experts,
                      int length,
                      mx::Stream s);

GatherSizes gather_sizes(const mx::array& x, const mx::array& rhs, int64_t experts);
GatherIds pointers_of(const PairIds& ids);

// True if the result has no elements, or is sums without terms; `out` then gets its memory.
bool is_trivial_product(const mx::array& x, mx::array& out, mx::Stream s);

}  // namespace mlx_anvil
